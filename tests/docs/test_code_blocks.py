"""Every code block of README and documentation runs, in order, as a reader would run it.

A block that cannot run here is marked so in its page: ``<!-- skip: next "why" -->``. Python blocks share the names of a page.
Blocks of the console are ``radixkv`` commands with their output, in which ``...`` stands for anything.
"""

from __future__ import annotations

import doctest
import json
import shlex
import tempfile
import tomllib
import unittest
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from support.server_process import ServerProcess
from sybil import Example, Sybil
from sybil.document import Document
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser
from typer.testing import CliRunner

import radixkv
from radixkv.cli.main import app
from radixkv.observe.simulate import report
from radixkv.observe.simulate.synthetic import SYNTHETIC

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Languages of blocks that are read, not run.
READ_ONLY = {"text"}


def run_console(example: Example) -> str | None:
    """Run each command and compare what it prints; returns what differs."""
    for command in example.parsed.split("$ ")[1:]:
        line, _, expected = command.partition("\n")
        program, *arguments = shlex.split(line)
        assert program == "radixkv", f"only radixkv commands run here: {line}"
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, f"{line}: {result.exception!r}\n{result.output}"
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        if expected and not doctest.OutputChecker().check_output(expected, result.stdout, flags):
            return f"$ {line}\nexpected:\n{expected}\nprinted:\n{result.stdout}"
    return None


def refuse_to_run(example: Example) -> str:
    return "blocks of sh change the machine: mark this one with <!-- skip: next -->, or make it a console block"


def check_toml(example: Example) -> None:
    tomllib.loads(example.parsed)


def check_yaml(example: Example) -> None:
    yaml.safe_load(example.parsed)


def check_json(example: Example) -> None:
    json.loads(example.parsed)


SYBIL = Sybil(
    parsers=[
        PythonCodeBlockParser(),
        CodeBlockParser("console", run_console),
        CodeBlockParser("sh", refuse_to_run),
        CodeBlockParser("toml", check_toml),
        CodeBlockParser("yaml", check_yaml),
        CodeBlockParser("json", check_json),
        SkipParser(),
    ]
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--api-key", "KEY-OF-ANN", "--api-key", "KEY-OF-BOB") as process:
        yield process


@pytest.fixture
def readers_machine(
    default_llm: radixkv.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """``LLM()`` is the default model, which tests load once, the server listens where the page says, and nothing is left.

    Simulations replay a tenth of their requests.
    """
    import anthropic  # here, since it takes seven seconds, and collecting the tests does not need it

    load, open_ai, claude = radixkv.LLM, openai.OpenAI, anthropic.Anthropic

    def load_once(model: Any = None, **options: Any) -> radixkv.LLM:
        defaults = {"quantization": None, "kv_cache_dtype": "auto", "record_trace": None}
        return default_llm if model is None and options.items() <= defaults.items() else load(model, **options)

    def connect(base_url: str, api_key: str) -> openai.OpenAI:
        assert base_url == "http://127.0.0.1:8000/v1"
        process: ServerProcess = request.getfixturevalue("server")
        return open_ai(base_url=f"{process.url}/v1", api_key=api_key)

    def connect_claude(base_url: str, api_key: str) -> anthropic.Anthropic:
        assert base_url == "http://127.0.0.1:8000"
        process: ServerProcess = request.getfixturevalue("server")
        return claude(base_url=process.url, api_key=api_key)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(radixkv, "LLM", load_once)
    monkeypatch.setattr("openai.OpenAI", connect)
    monkeypatch.setattr("anthropic.Anthropic", connect_claude)
    monkeypatch.setattr(report, "SYNTHETIC", {name: partial(make, 600) for name, make in SYNTHETIC.items()})


def documents() -> Iterator[Any]:
    for path in PAGES:
        document = SYBIL.parse(path)
        if any(True for _ in document.examples()):
            yield pytest.param(document, id=str(path.relative_to(ROOT)))


@pytest.mark.parametrize("document", documents())
@pytest.mark.usefixtures("readers_machine")
def test_every_block_runs(document: Document) -> None:
    for example in document.examples():
        try:
            example.evaluate()
        except unittest.SkipTest:
            continue


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_has_a_language_that_is_run_or_only_read(path: Path) -> None:
    fences = [line.strip() for line in path.read_text().splitlines() if line.strip().startswith("```")]
    languages = {fence.strip("`") for fence in fences[::2]}
    included = {"{.python .example}"}  # a whole program, which `tests/test_examples.py` runs
    assert languages <= {"python", "console", "sh", "toml", "yaml", "json"} | READ_ONLY | included
    assert set(fences[1::2]) <= {"```"}
