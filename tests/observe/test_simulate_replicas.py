"""Replicas behind routers: counted by hand where that is possible, and what the router promises."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.written_traces import BLOCK_SIZE, traced
from typer.testing import CliRunner

from radixkv.cli.main import app
from radixkv.observe.simulate.replicas.choosers import ROUTERS, PowerOfTwo, Prefix, RoundRobin, SessionAffinity
from radixkv.observe.simulate.replicas.cluster import Cluster, imbalance, least_imbalance
from radixkv.observe.simulate.replicas.cost_model import CostModel
from radixkv.observe.simulate.replicas.report import parse_replicas, run_router, stretch_for
from radixkv.observe.simulate.report import parse_names
from radixkv.observe.simulate.synthetic import chats, documents
from radixkv.observe.simulate.trace import Trace
from radixkv.routing import Router

COST = CostModel(prefill=1.0, decode=0.5, step=1.0, chunk=1000)


def timed(*requests: tuple[float, list[int], int]) -> Trace:
    """A trace of requests by their time, the blocks of their prompt, and the number of tokens of their answer."""
    return Trace(
        [traced(time, prompt, num_output_tokens=num_tokens) for time, prompt, num_tokens in requests], BLOCK_SIZE
    )


def test_times_are_those_of_the_cost_model() -> None:
    trace = timed((0.0, [1, 2], 4), (0.0, [1, 2, 3], 1), (100.0, [1, 2], 1))
    outcome = Cluster(trace, 1, 100, COST).run(RoundRobin(1, 0))
    assert outcome.num_hit_blocks == 4
    # 20 tokens, the last one of the prompt, and a step; 10 + 1 tokens and a step beside one that decodes; a full hit.
    assert outcome.first_token_seconds == [22.0, 22.0 + 11 + 1.5, 2.0]
    assert outcome.busy == [{0: 10.0, 1: 10.0, 2: 10.0, 3: 4.5, 10: 2.0}]


def test_decoding_takes_longer_beside_a_prompt() -> None:
    # Blocks for one prompt at a time: the second waits for the end of the first.
    alone = timed((0.0, [1, 2], 4), (0.0, [3, 4], 1))
    outcome = Cluster(alone, 1, 3, COST).run(RoundRobin(1, 0))
    assert outcome.first_token_seconds == [22.0, 22.0 + 4 * 1.5 + 22.0]
    # The third does as well, but the first gets only 22.5 / 22.5 = 1 token while the second is computed.
    beside = timed((0.0, [1, 2], 4), (0.0, [3, 4], 100), (0.0, [5, 6], 1))
    outcome = Cluster(beside, 1, 5, COST).run(RoundRobin(1, 0))
    step = 1.0 + 21 + 0.5
    assert outcome.first_token_seconds[:2] == [22.0, 22.0 + step]
    assert outcome.first_token_seconds[2] == pytest.approx(22.0 + step + 3 * 2.0 + 1 + 21 + 0.5)


def test_one_cache_finds_what_any_replica_computed() -> None:
    trace = timed((0.0, [1, 2], 0), (100.0, [1, 2], 0), (200.0, [1, 2], 0))
    apart = Cluster(trace, 2, 10, COST).run(RoundRobin(2, 0))
    shared = Cluster(trace, 2, 10, COST, one_cache=True).run(RoundRobin(2, 0))
    assert (apart.num_hit_blocks, shared.num_hit_blocks) == (2, 4)


def test_a_prompt_waits_for_the_blocks_of_a_cache_that_another_replica_fills() -> None:
    """A replica that decoded nothing took it for too large: it began at once, and nothing of it was cached."""
    trace = timed((0.0, [1, 2], 4), (0.0, [3, 4], 0), (100.0, [3, 4], 0))
    outcome = Cluster(trace, 2, 1, COST, one_cache=True).run(RoundRobin(2, 0))
    assert outcome.first_token_seconds[1] == 22.0 + 4 * 1.5 + 22.0
    assert outcome.num_hit_blocks == 2


def test_a_prompt_larger_than_the_cache_is_computed_at_once() -> None:
    trace = timed((0.0, [1, 2], 4), (0.0, [3, 4, 5], 0), (0.0, [3, 4], 0))
    outcome = Cluster(trace, 1, 2, COST).run(RoundRobin(1, 0))
    assert outcome.first_token_seconds[:2] == [22.0, 22.0 + 31 + 1.5]
    assert outcome.num_hit_blocks == 0


def test_all_ingresses_are_notified_of_a_request_with_a_delay() -> None:
    told: list[tuple[float, str, int]] = []

    class Listening(RoundRobin):
        def note(self, event: str, request: int) -> None:
            told.append((round(cluster.now, 1), event, request))

        def expect(self, replica: int, request: int, blocks: Sequence[int], num_tokens: int) -> None:
            self.note("expect", request)

        def expected_prefilled(self, replica: int, request: int) -> None:
            self.note("prefilled", request)

        def expected_finished(self, replica: int, request: int) -> None:
            self.note("finished", request)

        def report(self, replica: int, seconds_per_token: float | None) -> None:
            assert seconds_per_token is None  # prompts this short tell nothing of the speed

    # 20 tokens and one in 22 seconds, and then four in four.
    cluster = Cluster(timed((0.0, [1, 2], 4), (1.0, [1, 3], 0)), 1, 100, COST)
    cluster.run(Listening(1, 0))
    assert told[:3] == [(0.1, "expect", 0), (1.1, "expect", 1), (22.1, "prefilled", 0)]
    assert sorted(event for _, event, request in told if request == 1) == ["expect", "finished", "prefilled"]
    assert len(told) == 6


def test_imbalance_is_the_busiest_against_the_average() -> None:
    assert imbalance([{0: 4.0, 1: 2.0}, {0: 2.0, 1: 2.0}, {7: 1.0}], 5) == (4.0 / 2.0 + 2.0 / (4.0 / 3)) / 2
    assert imbalance([{}, {}], 5) == 1.0


def test_a_prompt_that_cannot_be_parted_leaves_imbalance_to_the_best_router() -> None:
    # On each replica one of 12 seconds.
    outcome = Cluster(timed((0.0, [1], 0), (5.0, [2], 0)), 2, 100, COST).run(RoundRobin(2, 0))
    assert outcome.longest == {0: 10.0, 1: 7.0}
    busy = [{0: 6.0, 1: 9.0}, {0: 4.0, 1: 3.0}, {0: 2.0}, {7: 5.0}]
    # The average is 3 in both windows: the longest prompt takes twice as much in the first, and less in the second.
    assert least_imbalance(busy, {0: 6.0, 1: 2.5, 7: 5.0}, 5) == (2.0 + 1.0) / 2
    assert least_imbalance([{}, {}], {}, 5) == 1.0


def test_baseline_routers_choose_by_their_rules() -> None:
    turns = RoundRobin(3, 0)
    assert [turns.choose(number, [], 1) for number in range(4)] == [0, 1, 2, 0]
    two = PowerOfTwo(2, 0)
    assert {two.choose(0, [], 1), two.choose(1, [], 1)} == {0, 1}
    sessions = SessionAffinity(50, 0)
    first = sessions.choose(0, [1, 2, 3], 1)
    assert sessions.choose(1, [1, 2, 3, 4, 5], 1) == first
    assert sessions.choose(2, [1, 2, 3, 4, 5, 6], 1) == first
    # Many begin with block 1, so those are not one session.
    assert len({sessions.choose(10 + number, [1, 100 + number], 1) for number in range(20)}) > 5


def test_the_router_finds_what_one_cache_finds_and_answers_sooner_than_power_of_two() -> None:
    trace = documents(1000, seed=3)
    cost, num_blocks = CostModel(), int(0.3 * trace.num_distinct_blocks)
    stretch = stretch_for(trace, 8, num_blocks, cost, 0.7)
    rows = {
        name: run_router(trace, name, 8, num_blocks, cost, stretch) for name in ("prefix", "power-of-two", "one-cache")
    }
    assert rows["prefix"].hit_rate > 0.92 * rows["one-cache"].hit_rate
    assert rows["prefix"].p99 < 0.8 * rows["power-of-two"].p99


def test_the_command_writes_a_table_json_and_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 500 * n, "hash_ids": [0, n % 5, 10 + n], "output_length": 20} for n in range(60)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    real_import = builtins.__import__

    def without_ray(name: str, *arguments: Any) -> Any:
        if name.startswith("ray."):
            raise ImportError("planted")
        return real_import(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    options = ["--replicas", "2,4", "--json", str(figures), "--plot", str(picture)]
    result = CliRunner().invoke(app, ["simulate", str(trace), *options], catch_exceptions=False)
    assert "not run: ray-prefix" in result.stdout
    report = json.loads(figures.read_text())
    assert [(row["num_replicas"], row["router"]) for row in report["rows"]] == [
        (count, name) for count in (2, 4) for name in ("prefix", "round-robin", "power-of-two", "session", "one-cache")
    ]
    assert report["not_run"] == ["ray-prefix"]
    assert picture.stat().st_size > 1000
    with pytest.raises(ValueError, match="--router: ray-prefix needs a package"):
        CliRunner().invoke(
            app, ["simulate", str(trace), "--replicas", "2", "--router", "ray-prefix"], catch_exceptions=False
        )


@pytest.mark.parametrize("text", ["", "0", "4,x", "1.5", "2000"])
def test_impossible_numbers_of_replicas_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--replicas: expected whole numbers from 1 to 1024"):
        parse_replicas(text)


def test_unknown_routers_are_refused() -> None:
    with pytest.raises(ValueError, match="--router: expected all or some of prefix, round-robin"):
        parse_names("--router", "prefix,fastest", ROUTERS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--replicas 2 --blocks 1%,2%", "--blocks: with --replicas, expected one size"),
        ("--replicas 2 --policy lru", "--policy: not together with --replicas"),
        ("--replicas 2 --tier host=5%@1", "--tier: not together with --replicas"),
        ("--router all", "--router: only with --replicas"),
        ("--step-ms 25", "--step-ms: only with --replicas"),
        ("--prefill-ms 3", "--prefill-ms: only with --replicas or --tier"),
        ("--replicas 2 --load inf", "--load: expected a finite number above 0, got inf"),
        (
            "--replicas 2 --ingresses 2 --router session",
            "--ingresses: only with --router prefix or all, got 'session'",
        ),
        ("--tier host=5%@1 --prefill-ms inf", "--prefill-ms: expected a finite number of milliseconds, got inf"),
        ("--replicas 2 --decode-ms inf", "--decode-ms: expected a finite number of milliseconds, got inf"),
        ("--replicas 2 --step-ms inf", "--step-ms: expected a finite number of milliseconds, got inf"),
        ("--blocks=", "--blocks: expected numbers of blocks, or shares such as 5%, above 0, got ''"),
        ("--replicas 2 --blocks=", "--blocks: expected numbers of blocks, or shares such as 5%, above 0, got ''"),
    ],
)
def test_options_without_effect_or_sense_are_refused(options: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(app, ["simulate", "chats", *options.split()], catch_exceptions=False)


@pytest.mark.parametrize("make", [documents, chats])
def test_several_ingresses_agree(make: Callable[..., Trace]) -> None:
    """Of conversations that overload replicas, four found four fifths of what one finds, and answered documents later."""
    trace = make(num_requests=1500)
    num_blocks, cost = int(trace.num_distinct_blocks * 0.3), CostModel()
    stretch = stretch_for(trace, 4, num_blocks, cost, 0.85)
    alone, several = (run_router(trace, "prefix", 4, num_blocks, cost, stretch, count) for count in (1, 4))
    assert several.hit_rate > 0.98 * alone.hit_rate
    assert several.p99 < 1.2 * alone.p99


def test_each_ingress_gets_replicas_speed_although_others_use_them_all_the_time() -> None:
    trace = documents(num_requests=150)
    num_blocks, cost = int(trace.num_distinct_blocks * 0.3), CostModel()
    stretch = stretch_for(trace, 2, num_blocks, cost, 0.95)
    cluster = Cluster(trace, 2, num_blocks // 2, cost, stretch=stretch)
    routers = [Router(trace.block_size, seconds_per_token=1.0, clock=lambda: cluster.now) for _ in range(4)]
    cluster.run(Prefix(2, routers, 0))
    # A full step, with none and with a hundred sequences that decode beside it.
    least, most = (cost.prefill + (cost.step + cost.decode * count) / cost.chunk for count in (0, 100))
    speeds = [[replica.seconds_per_token for replica in router._replicas.values()] for router in routers]
    assert speeds == speeds[:1] * 4
    assert all(least * 0.99 < speed < most for speed in speeds[0])
