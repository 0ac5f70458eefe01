"""The command line as a user runs it: real processes where the process matters, which take seconds to start."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
from support.loaded_once import models_loaded_once
from support.preloaded_process import COMMAND_LINE, run_preloaded
from typer.main import get_command

from radixkv import __main__
from radixkv.cli import cluster
from radixkv.cli.consoles import PlainConsole
from radixkv.cli.demo import QUESTIONS, SYSTEM
from radixkv.cli.main import app, main
from radixkv.errors import MissingPackageError
from radixkv.extras import needing_extra


def radixkv(
    *arguments: str, encoding: str = "utf-8", num_layers: int | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, without input; the default model has that many layers, or all."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as streams:
        patch.setattr(sys, "argv", ["radixkv", *arguments])
        for name, value in environment.items():
            patch.setenv(name, value)
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding, write_through=True) for _ in range(2))
        streams.enter_context(contextlib.redirect_stdout(out))
        streams.enter_context(contextlib.redirect_stderr(err))
        streams.enter_context(models_loaded_once(num_layers))
        with pytest.raises(SystemExit) as end:
            main()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(sys.argv, end.value.code or 0, out.read(), err.read())


@pytest.mark.parametrize(
    "work",
    ["import radixkv.cache", "from radixkv.cli.main import main\ntry: main()\nexcept SystemExit: pass"],
    ids=["the cache", "help"],
)
def test_torch_is_not_loaded_without_need(work: str) -> None:
    program = f"{work}\nimport sys\nprint('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("False\n")


def test_every_option_of_every_command_has_a_help_text() -> None:
    pending: list[Any] = [get_command(app)]
    for command in pending:  # grows
        pending += getattr(command, "commands", {}).values()
        assert [parameter.name for parameter in command.params if not parameter.help] == []
    assert len(pending) > 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["serve", "--port", "99999"],
            "'--port' (env var: 'RADIXKV_PORT'): expected less than or equal to 65535, got '99999'",
        ),
        (["generate", "Hi", "--max-tokens", "x"], "'--max-tokens': expected a valid integer, got 'x'"),
        (["bench", "e2e", "--rounds", "0"], "'--rounds': expected greater than or equal to 1, got '0'"),
        (
            ["serve", "--eviction-policy", "x"],
            "'--eviction-policy' (env var: 'RADIXKV_EVICTION_POLICY'): 'x' is not one of",
        ),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_an_error_of_an_option_has_the_value_and_what_was_expected(arguments: list[str], message: str) -> None:
    result = radixkv(*arguments)
    assert result.returncode == 2
    assert f"Invalid value for {message}" in result.stderr


def test_the_help_says_all_of_every_command_on_a_narrow_terminal() -> None:
    text = " ".join(radixkv("--help", COLUMNS="80").stdout.split())
    assert (
        "warm Compute prompts and store them in --disk-cache or --shared-cache, for servers that start later or" in text
    )
    assert "..." not in text.partition("Commands:")[2]


def test_the_demo_shows_equal_answers_and_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Fewer, shorter prompts, answers a quarter as long, and few layers: some hundred tokens are enough to differ.
    monkeypatch.setattr("radixkv.cli.demo.ANSWER_TOKENS", 8)
    monkeypatch.setattr("radixkv.cli.demo.SYSTEM", SYSTEM[: len(SYSTEM) // 3])
    monkeypatch.setattr("radixkv.cli.demo.QUESTIONS", QUESTIONS[:3])
    path = tmp_path / "demo.json"
    result = radixkv("demo", "--json", str(path), num_layers=4)
    assert result.returncode == 0, result.stderr
    document = json.loads(path.read_text())
    assert {"cpu", "torch"} <= document["machine"].keys()
    assert [row["equal"] for row in document["rows"]] == [True] * 4
    assert all(row["computed_with"] < row["computed_without"] for row in document["rows"])
    wastes = [(round(m["contiguous_waste"], 3), m["block_waste"] < 0.02) for m in document["memory"]]
    assert wastes == [(0.430, True), (0.451, True)]
    assert "radix tree" in result.stdout


def test_chat_answers_piped_turns_and_reuses_them() -> None:
    result = run_preloaded(COMMAND_LINE, "chat", "--max-tokens", "8", stdin="Hello!\n\nHow are you?\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("prompt tokens") == 2
    assert " 0 reused" in result.stdout


def test_generate_prints_json() -> None:
    result = radixkv("generate", "One, two,", "--max-tokens", "5", "--kv-cache-dtype", "fp8", "--json")
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)["token_ids"]) == 5


def test_several_answers_need_no_other_option() -> None:
    """They used to be refused, since all would be the same at the command's own temperature."""
    result = radixkv("generate", "One, two,", "--max-tokens", "5", "--n", "3", "--json", num_layers=1)
    assert result.returncode == 0, result.stderr
    texts = [json.loads(line)["text"] for line in result.stdout.splitlines()]
    assert len(texts) == 3
    assert len({*texts}) > 1


@pytest.mark.parametrize("command", ["chat", "generate"])
@pytest.mark.parametrize(
    ("option", "value"),
    [("--dtype", "float8"), ("--device", "tpu"), ("--kv-cache-memory-bytes", "x"), ("--speculative-config", "{")],
)
def test_options_of_models_and_memory_reach_the_llm(command: str, option: str, value: str) -> None:
    prompts = ["Hi"] if command == "generate" else []
    result = radixkv(command, *prompts, "--model", "/no/such/model", option, value)
    assert result.returncode == 1
    assert result.stderr.startswith(f"radixkv: {option[2:].replace('-', '_')}: expected ")


@pytest.mark.parametrize("option", ["--n", "--temperature", "--top-p", "--seed"])
def test_a_beam_search_refuses_options_of_sampling(option: str) -> None:
    """They used to be ignored."""
    result = radixkv("generate", "x", "--model", "/no/such/model", "--beam-width", "2", option, "1")
    message = f"radixkv: {option}: not together with --beam-width, which does not sample\n"
    assert (result.returncode, result.stderr) == (1, message)


def test_no_line_of_an_answer_is_broken() -> None:
    prompt = "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen,"
    plain = radixkv("generate", prompt, "--max-tokens", "5")
    assert plain.stdout.startswith(prompt)
    beams = radixkv("generate", prompt, "--max-tokens", "5", "--beam-width", "2", "--json")
    assert [json.loads(line)["text"].startswith(prompt) for line in beams.stdout.splitlines()] == [True, True]


def test_characters_that_a_terminal_cannot_show_end_nothing() -> None:
    result = radixkv("explain", "snow, é ice", "--after", "snow, é rain", encoding="ascii")
    assert result.returncode == 0, result.stderr
    assert "\\xe9" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "soak", "--minutes", "60", "--json"],
        ["demo", "--json"],
        ["bench", "serve", "--plot"],
        ["bench", "cache-scaling", "--plot"],
        ["simulate", "documents", "--plot"],
        ["inspect", "no-such-snapshot", "--svg"],
        ["generate", "x", "--model", "/no/such/model", "--record-trace"],
    ],
    ids=" ".join,
)
def test_files_that_cannot_be_written_are_refused_before_the_work(arguments: list[str], tmp_path: Path) -> None:
    for path, complaint in ((tmp_path / "no" / "x.png", "is not a directory"), (tmp_path, "is a directory")):
        result = radixkv(*arguments, str(path), COLUMNS="200", TERM="dumb")
        assert result.returncode == 2
        assert complaint in result.stderr
        assert not result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--json", ""],
        ["bench", "serve", "--plot", ""],
        ["simulate", "documents", "--plot", ""],
        ["inspect", "no-such-snapshot", "--svg", ""],
        ["store", "clear", ""],
    ],
    ids=" ".join,
)
def test_an_empty_path_is_not_the_folder_that_the_command_was_started_in(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was stored there was cleared, where the shell's variable was not set."""
    monkeypatch.chdir(tmp_path)
    result = radixkv(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert "expected a path, got ''" in result.stderr


def test_a_plot_has_a_format_that_can_be_drawn(tmp_path: Path) -> None:
    for name in ("x.doc", "x"):
        result = radixkv("bench", "serve", "--plot", str(tmp_path / name), COLUMNS="400", TERM="dumb")
        assert result.returncode == 2
        assert "must end in one of" in result.stderr


def test_a_chat_without_standard_input_says_so() -> None:
    command = [sys.executable, "-c", COMMAND_LINE, "chat", "--model", "/no/such/model"]
    closed = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    result = subprocess.run(closed, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr == "radixkv: standard input is closed, and turns are read from it\n"


@pytest.mark.parametrize(
    ("error", "words"),
    [(ImportError("redis is not installed"), "redis is not installed"), (MemoryError(), "MemoryError")],
    ids=["missing package", "no memory"],
)
def test_an_error_is_one_line_that_says_what_it_is(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lack of memory, of which Python says no more, was an empty line."""
    monkeypatch.setattr("radixkv.cli.main.app", Mock(side_effect=error))
    result = radixkv("doctor")
    assert (result.returncode, result.stderr) == (1, f"radixkv: {words}\n")


def test_an_interrupt_while_modules_are_imported_prints_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("radixkv.cli.main")
    vars(module)["__getattr__"] = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as end:
        __main__.main()
    assert isinstance(end.value, SystemExit)
    assert end.value.code == 130


def test_only_a_module_that_is_not_there_is_called_not_installed() -> None:
    """Any error of an import was: "None is not installed"."""
    advice = r"^uvicorn is not installed: pip install 'radixkv\[server\]'$"
    with pytest.raises(MissingPackageError, match=advice), needing_extra("server"):
        raise ModuleNotFoundError(name="uvicorn")
    with pytest.raises(ImportError, match=r"^shared_cache: redis is not installed$"), needing_extra("server"):
        raise ImportError("shared_cache: redis is not installed")


def test_a_secret_in_another_encoding_is_named(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes("geheim für alle".encode("latin-1"))
    result = radixkv("ingress", "--replica", "a=http://127.0.0.1:1", "--secret-file", str(file))
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(f"radixkv: secret_file: expected UTF-8 in {file}: ")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("ingress", "--queue-timeout"),
        ("ingress", "--step-timeout"),
        ("replica", "--tool-call-parser"),
        ("replica", "--reasoning-parser"),
        ("replica", "--seed"),
    ],
)
def test_an_ingress_and_a_replica_offer_no_option_that_they_cannot_fulfil(command: str, option: str) -> None:
    """An ingress's first was refused only once a replica was up; the others had no effect."""
    result = radixkv(command, option, "1", RADIXKV_REPLICA_SECRET="short", COLUMNS="200", TERM="dumb")
    assert result.returncode == 2
    assert f"No such option: {option}" in result.stderr


@pytest.mark.parametrize(
    "command", [["replica"], ["ingress", "--replica", "a=http://127.0.0.1:1"]], ids=lambda words: words[0]
)
def test_a_short_secret_is_refused_with_where_it_came_from(command: list[str], tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("short")
    for options, variable, source in (
        ([], "short", "RADIXKV_REPLICA_SECRET"),
        (["--secret-file", str(file)], "", file),
    ):
        result = radixkv(*command, *options, RADIXKV_REPLICA_SECRET=variable)
        assert result.stderr == f"radixkv: secret: expected at least 16 printable ASCII characters in {source}\n"


def test_what_a_user_can_mend_is_one_line() -> None:
    for arguments in (["generate", "x", "--model", "/no/such/model"], ["generate", "x", "--top-p", "2"]):
        result = radixkv(*arguments)
        assert result.returncode == 1
        assert result.stderr.startswith("radixkv: ")
        assert result.stderr.count("\n") == 1
    for command, message in (
        ("inspect", "source: expected a file or a URL, got ''"),
        ("simulate", "trace: expected a file or one of chats, agents, "),
    ):
        nothing = radixkv(command, "")
        assert (nothing.returncode, nothing.stderr.count("\n")) == (1, 1)
        assert nothing.stderr.startswith(f"radixkv: {message}")
    texts = radixkv("explain", "x", "--after", "y\udcff")
    assert (texts.returncode, texts.stderr) == (
        1,
        "radixkv: after: character 1 is half of a surrogate pair, not Unicode text\n",
    )
    blocks_of_nothing = radixkv("explain", "x", "--after", "y", "--block-size", "0")
    assert blocks_of_nothing.returncode == 2
    assert "--block-size" in blocks_of_nothing.stderr


def test_the_end_of_a_secrets_last_line_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kubernetes sets a variable to a file's whole content; sent in a header, a line end made each request fail."""
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    monkeypatch.setenv("RADIXKV_REPLICA_SECRET", file.read_text())
    assert cluster._secret(None) == cluster._secret(file) == "0123456789abcdef"
    monkeypatch.setenv("RADIXKV_REPLICA_SECRET", "01234567\n89abcdef")
    with pytest.raises(ValueError, match="secret: expected at least 16 printable ASCII characters in RADIXKV_REPLICA"):
        cluster._secret(None)


def test_figures_are_written_when_the_reader_of_a_pipe_leaves(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ["simulate", "chats", "--blocks", "100", "--policy", "lru", "--json", str(path)]
    command = [sys.executable, "-c", COMMAND_LINE, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.wait()
    assert json.loads(path.read_text())["rates"]["lru"]


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["keys", "new", "ann"], ["simulate", "TRACE", "--blocks", "1", "--policy", "lru"]],
    ids=lambda words: words[0],
)
def test_a_command_ends_without_a_message_when_the_reader_of_a_pipe_leaves(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status was that of an error, or Python complained that the last lines could not be written."""
    trace = tmp_path / "trace"
    trace.write_text('{"timestamp": 0, "hash_ids": [1]}\n')
    monkeypatch.setattr(sys, "argv", ["radixkv", *(str(trace) if word == "TRACE" else word for word in arguments)])
    reader, writer = os.pipe()
    os.close(reader)
    err = io.StringIO()
    with (
        open(writer, "w") as out,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        main()
    assert (end.value.code, err.getvalue()) == (128 + signal.SIGPIPE, "")


def test_an_error_is_reported_although_nobody_reads_what_was_written_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ended as if nothing but the reader was wrong."""

    def fail() -> None:
        print("a line")
        raise ValueError("it went wrong")

    monkeypatch.setattr(sys.modules[main.__module__], "app", fail)
    reader, writer = os.pipe()
    os.close(reader)
    err = io.StringIO()
    with (
        open(writer, "w") as out,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        main()
    assert (end.value.code, err.getvalue()) == (1, "radixkv: it went wrong\n")


@pytest.mark.parametrize("variable", ["1", ""])
def test_where_no_colour_is_wanted_nothing_is_written_but_text(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cursor was moved all the same."""
    monkeypatch.setenv("NO_COLOR", variable)
    monkeypatch.setenv("TERM", "xterm")
    file = io.StringIO()
    monkeypatch.setattr(file, "isatty", lambda: True, raising=False)
    console = PlainConsole(file=file)
    with console.status("loading"):
        console.print("[bold]text[/]")
    assert ("\x1b" in file.getvalue()) == (not variable)
    assert "text" in file.getvalue()
