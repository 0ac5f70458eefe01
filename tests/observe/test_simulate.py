"""Replays give the hit rates that were counted by hand, and no policy exceeds the bounds."""

from __future__ import annotations

import errno
import json
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.written_traces import BLOCK_SIZE, trace_of, traced
from typer.testing import CliRunner

from radixkv.cache import LRU, POLICIES, EvictionPolicy
from radixkv.cli.main import app
from radixkv.engine.trace_recorder import TraceRecorder
from radixkv.observe.simulate.bounds import belady, block_lru, unlimited
from radixkv.observe.simulate.replay import replay
from radixkv.observe.simulate.report import Report, advise, load, parse_names, parse_sizes, simulate
from radixkv.observe.simulate.synthetic import SYNTHETIC, agents, chats, documents, long_documents, mixed, scans
from radixkv.observe.simulate.trace import Trace, read_trace
from radixkv.observe.trace_format import TRACE_FORMAT, TRACE_VERSION


def hit_rate(trace: Trace, num_blocks: int, policy: EvictionPolicy) -> float:
    """Hits per requested block."""
    return sum(replay(trace, num_blocks, policy)) / max(1, trace.num_asked_blocks)


def test_hits_are_counted_by_blocks() -> None:
    trace = trace_of([[1, 2, 3], [1, 2, 4], [9, 9], [1, 2, 3]])
    assert unlimited(trace) == (2 + 3) / 11
    assert hit_rate(trace, 100, LRU()) == (2 + 3) / 11
    # Five blocks: the scan of the third request evicts 3, the oldest leaf.
    assert hit_rate(trace, 5, LRU()) == (2 + 2) / 11


def test_requests_of_one_instant_are_used_one_after_another() -> None:
    """Which of them counted as the least recently used depended on the order in which leaves were indexed."""
    prompts = [[1, 2], [1, 0], [0], [2, 1, 1], [1, 1]]
    apart = trace_of(prompts)
    at_once = Trace([replace(request, time=0.0) for request in apart.requests], BLOCK_SIZE)
    assert list(replay(at_once, 4, LRU())) == list(replay(apart, 4, LRU())) == [0, 1, 0, 0, 0]
    assert all(sum(replay(at_once, 4, make())) <= 5 for make in POLICIES.values())


def test_belady_s_bound_evicts_the_farthest_next_use() -> None:
    trace = trace_of([[1], [2], [3]] * 3)
    assert hit_rate(trace, 2, LRU()) == block_lru(trace, 2) == 0
    assert belady(trace, 2) == 4 / 9
    assert belady(trace, 3) == unlimited(trace) == 6 / 9


def test_a_request_larger_than_the_cache_leaves_nothing() -> None:
    trace = trace_of([[1, 2], [1, 2, 3, 4], [1, 2]])
    assert hit_rate(trace, 2, LRU()) == block_lru(trace, 2) == 4 / 8


def test_answers_are_cached_but_not_counted_as_requested() -> None:
    trace = Trace([traced(0.0, [1], [2, 3]), traced(1.0, [1, 2, 3, 4])], BLOCK_SIZE)
    assert unlimited(trace) == hit_rate(trace, 9, LRU()) == block_lru(trace, 9) == belady(trace, 9) == 3 / 5


@pytest.mark.parametrize("make", [chats, agents, documents, long_documents, partial(mixed, seed=2), scans])
def test_adaptive_is_near_the_best_on_every_synthetic_trace_and_no_policy_beats_the_bound(make: object) -> None:
    trace = make(num_requests=1500)  # type: ignore[operator]
    size = trace.num_distinct_blocks // 20
    rates = {name: hit_rate(trace, size, policy()) for name, policy in POLICIES.items()}
    assert rates["adaptive"] >= max(rates.values()) - 0.02
    assert max(rates.values()) <= belady(trace, size) <= unlimited(trace)
    assert rates["lru"] == pytest.approx(block_lru(trace, size), abs=0.02)


@settings(max_examples=200, deadline=None)
@example(asked="aaaaacbbca", size=3)
@given(asked=st.text("abcd", max_size=30), size=st.integers(3, 8))
def test_no_policy_beats_the_bound_where_answers_repeat(asked: str, size: int) -> None:
    """A block that an answer filled again counted as used, and took the place of one that was."""
    work: dict[str, tuple[list[int], list[int]]] = {
        "a": ([0], []),
        "b": ([1], []),
        "c": ([2], [3]),
        "d": ([4, 5], [6, 7]),
    }
    trace = Trace([traced(float(time), *work[letter]) for time, letter in enumerate(asked)], BLOCK_SIZE)
    for policy in POLICIES.values():
        assert hit_rate(trace, size, policy()) <= belady(trace, size) <= unlimited(trace)


def test_mooncakes_format_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 3000, "input_length": 1000, "output_length": 5, "hash_ids": [7, 10**15]}
    path.write_text(
        json.dumps(line) + "\n\n" + json.dumps(line | {"timestamp": 1500, "input_length": 400, "hash_ids": [7]})
    )
    trace = read_trace(path)
    assert trace.block_size == 512
    assert [(r.time, r.prompt.tolist()) for r in trace.requests] == [(0.0, [0]), (1.5, [0, 1])]
    assert (trace.num_asked_blocks, trace.num_distinct_blocks) == (3, 2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "text",
        "\udcff\udcfe",
        "[1]",
        '{"timestamp": 1}',
        '{"timestamp": "soon", "hash_ids": [1]}',
        '{"timestamp": NaN, "hash_ids": [1]}',
        '{"timestamp": 1, "hash_ids": 5}',
        '{"timestamp": 1, "hash_ids": [1], "input_lenght": 9}',
        '{"timestamp": 1, "hash_ids": [1], "chat_id": 5, "prioity": 9}',
        '{"format": "other", "version": 1, "block_size": 16}',
        '{"format": "radixkv-trace", "version": 1, "block_size": 0}',
    ],
)
def test_a_malformed_trace_is_refused_by_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=r"trace\.jsonl(, line 1|: there is no request)") as refusal:
        read_trace(path)
    if "lenght" in text:
        assert str(refusal.value).endswith("'input_length' is missing, and there is 'input_lenght'")
    if text == "[1]":
        assert str(refusal.value).endswith("expected an object with 'timestamp' and 'hash_ids': got [1]")


def test_equal_names_are_the_same_block_only_after_the_same_prefix(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    prompts = [[1, 2], [3, 2], [1, 2, 2], [2]]
    path.write_text("\n".join(json.dumps({"timestamp": 0, "hash_ids": prompt}) for prompt in prompts))
    trace = read_trace(path)
    assert [request.prompt.tolist() for request in trace.requests] == [[0, 1], [2, 3], [0, 1, 4], [5]]
    assert unlimited(trace) == 2 / 8


@pytest.mark.parametrize("field", ["hash_ids", "output_hash_ids"])
@pytest.mark.parametrize(
    "value", ["[2.0]", "[2.5]", '"419"', '{"4": 1}', "[true]", '["5"]', "[1e300]", "[[1]]", "null"]
)
def test_names_of_blocks_are_whole_numbers(field: str, value: str, tmp_path: Path) -> None:
    """2.0 and 2.1 were one block, and the digits of a string three."""
    path = tmp_path / "trace.jsonl"
    names = {"hash_ids": "[1]"} | {field: value}
    fields = "".join(f', "{name}": {value}' for name, value in names.items())
    path.write_text('{"timestamp": 0, "hash_ids": [1]}\n{"timestamp": 1' + fields + "}\n")
    with pytest.raises(ValueError, match=f"line 2: .*: {field}: expected a list of whole numbers, got "):
        read_trace(path)


@pytest.mark.parametrize(("num_tokens", "block_size"), [(16 * 40 - 5, 512), (512 * 40, 16)])
def test_blocks_of_another_size_are_refused(tmp_path: Path, num_tokens: int, block_size: int) -> None:
    """Each of the prompts has 40 blocks."""
    path = tmp_path / "trace.jsonl"
    header = {"format": "radixkv-trace", "version": 1, "block_size": block_size}
    line = {"timestamp": 0, "input_length": num_tokens, "hash_ids": list(range(40))}
    path.write_text(f"{json.dumps(header)}\n{json.dumps(line)}\n{json.dumps(line)}")
    with pytest.raises(ValueError, match=rf"trace\.jsonl: expected blocks of {block_size} tokens, got .* first line"):
        read_trace(path)
    path.write_text(json.dumps(header | {"block_size": -(-num_tokens // 40)}) + "\n" + json.dumps(line))
    assert read_trace(path).num_asked_blocks == 40


@pytest.mark.parametrize(("urgent", "others", "expected"), [(-1, 0, 5 / 20), (0, 1, 5 / 20), (1, 0, 0.0), (0, 0, 0.0)])
def test_the_priority_of_urgent_requests_keeps_their_blocks(
    tmp_path: Path, urgent: int, others: int, expected: float
) -> None:
    """An urgent prompt of one block returns after three others that never do, in a cache of three blocks."""
    path = tmp_path / "trace.jsonl"
    rows = []
    for second in range(0, 20, 4):
        rows.append({"timestamp": 1000 * second, "hash_ids": [7], "priority": urgent})
        rows += [
            {"timestamp": 1000 * (second + n), "hash_ids": [100 + second + n], "priority": others} for n in (1, 2, 3)
        ]
    rows.append({"timestamp": 20_000, "hash_ids": [7], "priority": urgent})
    path.write_text("\n".join(json.dumps(row) for row in rows))
    report = simulate("trace", read_trace(path), [3], ["lru", "priority"], Console(quiet=True))
    assert report.rates["lru"] == [0.0]
    assert report.rates["priority"] == [pytest.approx(expected * 20 / 21)]


def test_a_priority_other_than_a_whole_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "hash_ids": [1], "priority": "high"}))
    with pytest.raises(ValueError, match=r"line 1.*priority: expected a whole number, got 'high'"):
        read_trace(path)


def test_a_trace_that_is_not_there_is_named_beside_those_that_are_made_up() -> None:
    with pytest.raises(ValueError, match=r"trace: expected a file or one of chats, .*, got 'nope'"):
        load("nope")


def test_a_recorded_trace_shares_what_the_prompts_share_and_reveals_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with closing(TraceRecorder(path, 4)) as recorder:
        recorder.record("", list(range(10)), [50, 51, 52])
        recorder.record("", [*range(10), 50, 51, 99], [])
        recorder.record("tenant", list(range(10)), [], arrival=0.0, priority=-2)
    with closing(TraceRecorder(tmp_path / "again.jsonl", 4)) as recorder:
        recorder.record("", list(range(10)), [50, 51, 52])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"format": "radixkv-trace", "version": 1, "block_size": 4}
    first, second, tenant = lines[1:]
    assert (first["input_length"], first["output_length"]) == (10, 3)
    assert len(first["hash_ids"]) == 2
    assert [*first["hash_ids"], *first["output_hash_ids"]] == second["hash_ids"]
    assert not set(tenant["hash_ids"]) & set(first["hash_ids"])
    assert (tenant["priority"], "priority" in first) == (-2, False)
    again = json.loads((tmp_path / "again.jsonl").read_text().splitlines()[1])
    assert not set(again["hash_ids"]) & set(first["hash_ids"])
    trace = read_trace(path)
    assert trace.block_size == 4
    assert [request.priority for request in trace.requests] == [-2, 0, 0]


def test_a_trace_of_an_earlier_run_is_kept(tmp_path: Path) -> None:
    """A restart of the server used to erase it."""
    path = tmp_path / "trace.jsonl"
    path.touch()
    for number in range(3):
        with closing(TraceRecorder(path, 4)) as recorder:
            recorder.record("", list(range(10)), [0] * number)
    lengths = {each.name: json.loads(each.read_text().splitlines()[1])["output_length"] for each in tmp_path.iterdir()}
    assert lengths == {"trace.jsonl.1": 0, "trace.jsonl.2": 1, "trace.jsonl": 2}


def test_a_trace_that_cannot_be_renamed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be mounted by itself, as a file of a container."""
    path = tmp_path / "trace.jsonl"
    path.write_text("earlier")

    def refuse(*_: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(
        OSError, match=r"record_trace: the trace in '.*' cannot be renamed: Device or resource busy; move it"
    ):
        TraceRecorder(path, 4)
    assert [each.name for each in tmp_path.iterdir()] == ["trace.jsonl"]
    assert path.read_text() == "earlier"


def test_an_unfinished_last_line_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The trace of a server that was killed used to be impossible to replay."""
    path = tmp_path / "trace.jsonl"
    line = json.dumps({"timestamp": 0, "hash_ids": [1]})
    path.write_text(f"{line}\n{line}\n{line[:20]}")
    assert len(read_trace(path).requests) == 2
    assert caplog.messages == [f"{path}, line 3 is unfinished, and left out"]
    for wrong in (f"{line}\n{line[:20]}\n", line[:20]):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=r"line [12]: expected an object"):
            read_trace(path)


def test_a_trace_that_ends_in_its_first_request_has_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It used to be reported as a line of another format."""
    path = tmp_path / "trace.jsonl"
    header = json.dumps({"format": TRACE_FORMAT, "version": TRACE_VERSION, "block_size": 16})
    path.write_text(f'{header}\n{{"timestamp": 0, "ha')
    with pytest.raises(ValueError, match="there is no request in it"):
        read_trace(path)
    assert caplog.messages == [f"{path}, line 2 is unfinished, and left out"]


def test_sizes_and_policies_are_parsed() -> None:
    assert parse_sizes("2000,1000, 5%", 30_000) == [1000, 1500, 2000]
    assert parse_sizes("2%,40%", 10) == [1, 4]
    assert parse_names("--policy", "all", POLICIES) == list(POLICIES)
    assert parse_names("--policy", "lru, adaptive", POLICIES) == ["lru", "adaptive"]
    for wrong in ("", "0", "-5", "many", "0%", "nan%", "inf%", "5%%"):
        with pytest.raises(ValueError, match="--blocks"):
            parse_sizes(wrong, 1000)
    with pytest.raises(ValueError, match=r"--policy: expected all or some of lru.*got 'best'"):
        parse_names("--policy", "best", POLICIES)


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        (
            {"lru": [0.28, 0.34], "adaptive": [0.34, 0.35]},
            "1,000 blocks more (2.0 GiB) would raise the hit rate of lru from 0.28 to 0.34; adaptive gets there without.",
        ),
        (
            {"lru": [0.28, 0.34], "adaptive": [0.30, 0.35]},
            "1,000 blocks more (2.0 GiB) would raise the hit rate of lru from 0.28 to 0.34; "
            "adaptive reaches 0.30 with 1,000.",
        ),
        ({"lru": [0.28, 0.28]}, "lru stays near 0.28 up to 2,000 blocks."),
        ({"lru": [0.28, 0.14]}, "lru gains nothing up to 2,000 blocks."),
        (
            {"lru": [0.15, 0.30, 0.16]},
            "1,000 blocks more (2.0 GiB) would raise the hit rate of lru from 0.15 to 0.30.",
        ),
        ({"lfu": [0.5, 0.5]}, "1,000 blocks are enough: no cache of any size would hit more than 0.50."),
    ],
)
def test_the_advice_follows_from_the_hit_rates(rates: dict[str, list[float]], said: str) -> None:
    report = Report("trace", 10, 100, 100, 16, [1000, 2000, 3000][: len(next(iter(rates.values())))], 0.5, rates)
    assert advise(report, bytes_per_token=2**17) == said


@pytest.mark.parametrize("answer", [[], [8, 9]], ids=["nothing", "answers"])
def test_a_trace_in_which_no_prompt_fills_a_block_is_refused(answer: list[int], tmp_path: Path) -> None:
    """Where answers filled blocks, all rates were 0, and few blocks were said to be enough."""
    path = tmp_path / "trace.jsonl"
    header = {"format": "radixkv-trace", "version": 1, "block_size": 16}
    row = {"timestamp": 0, "hash_ids": [], "output_hash_ids": answer}
    path.write_text(f"{json.dumps(header)}\n{json.dumps(row)}\n")
    result = CliRunner().invoke(app, ["simulate", str(path)])
    assert str(result.exception) == f"{path}: no prompt of this trace fills a block of 16 tokens"


def test_the_command_writes_figures_and_a_plot(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 1000 * t, "hash_ids": [0, 1 + t % 7, 100 + t]} for t in range(60)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    options = ["--blocks", "6,20%", "--policy", "lru,adaptive", "--json", str(figures), "--plot", str(plot)]
    result = CliRunner().invoke(app, ["simulate", str(path), *options])
    assert result.exit_code == 0, result.output
    written = json.loads(figures.read_text())
    assert list(written["rates"]) == ["lru", "adaptive", "LRU by blocks", "Belady's bound"]
    assert written["advice"].split()[0] in result.output
    assert plot.stat().st_size > 1000
    assert set(SYNTHETIC) == {"chats", "agents", "documents", "long-documents", "mixed", "scans"}


@pytest.mark.parametrize("size", ["0", "-5"])
def test_tokens_without_bytes_are_refused(size: str) -> None:
    result = CliRunner().invoke(app, ["simulate", "chats", "--bytes-per-token", size, "--blocks", "no"])
    assert result.exit_code == 2
    assert "--bytes-per-token" in result.output


@pytest.mark.parametrize("name", ["input_length", "output_length"])
@pytest.mark.parametrize("value", ["1e400", "NaN", "-3", "true"])
def test_impossible_lengths_are_refused(name: str, value: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"timestamp": 0, "hash_ids": [1], "{name}": {value}}}')
    with pytest.raises(ValueError, match=f"line 1: .*{name}: expected a number of tokens, got "):
        read_trace(path)


def test_a_line_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="line 1: expected an object"):
        read_trace(path)
