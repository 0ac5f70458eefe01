"""What tiers would bring is counted as the engine would load it, and never more than a larger pool."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from support.written_traces import trace_of
from typer.testing import CliRunner

from radixkv.cache import POLICIES
from radixkv.cli.main import app
from radixkv.observe.simulate.report import simulate_trace
from radixkv.observe.simulate.synthetic import chats, documents
from radixkv.observe.simulate.tiers import TieredRun, TierSpec, simulate_tiers
from radixkv.observe.simulate.trace import Trace

LRU = POLICIES["lru"]


def run(of: Trace, size: int, *specs: TierSpec) -> TieredRun:
    (result,) = simulate_tiers(of, [size], LRU, specs, token_seconds=0.1)
    return result


def test_what_was_evicted_is_loaded_from_the_nearest_tier_that_has_it() -> None:
    again = trace_of([range(6), range(10, 16), range(20, 26), range(6)])
    near, far = TierSpec("near", 4, 0.25), TierSpec("far", 100, 0.5)
    assert run(again, 6, far) == TieredRun(6, 0, {"far": 6}, 18, 24.0, 18 + 6 * 0.5)
    # Of the nearer one, what was evicted later has taken the place; the last of a prefix goes first.
    both = run(again, 6, near, far)
    assert both.loaded == {"near": 0, "far": 6}
    assert run(trace_of([range(6), range(10, 16), range(6)]), 6, near, far).loaded == {"near": 4, "far": 2}


def test_what_was_loaded_is_in_the_nearer_tiers_too() -> None:
    prompts = [range(6), range(10, 16), range(20, 26)]
    near, far = TierSpec("near", 12, 0.25), TierSpec("far", 100, 0.5)
    counted = run(trace_of([*prompts, *prompts, prompts[0]]), 6, near, far)
    assert counted.pool == 0
    assert sum(counted.loaded.values()) == 24
    assert counted.seconds == 18 + counted.loaded["near"] * 0.25 + counted.loaded["far"] * 0.5


def test_what_was_loaded_for_a_refused_request_is_in_the_nearer_tiers() -> None:
    """The pool never holds it, and so does not evict it into them."""
    near, far = TierSpec("near", 6, 0.25), TierSpec("far", 100, 0.5)
    too_large = range(8)
    counted = run(trace_of([range(6), range(10, 16), range(20, 26), too_large, range(6)]), 6, near, far)
    assert counted.loaded == {"near": 6, "far": 6}


def test_a_tier_that_is_slower_than_computing_brings_nothing() -> None:
    again = trace_of([range(6), range(10, 16), range(6)])
    slow = run(again, 6, TierSpec("slow", 100, 1.0))
    assert slow.loaded == {"slow": 0}
    assert slow.seconds == slow.seconds_without == 18.0


@pytest.mark.parametrize("make", [chats, documents])
def test_a_pool_and_a_tier_hit_no_more_than_no_bound_and_no_less_than_the_pool(make: Callable[..., Trace]) -> None:
    whole = make(num_requests=1500)
    size = whole.num_distinct_blocks // 20
    alone = run(whole, size)
    everything = run(whole, size, TierSpec("disk", whole.num_distinct_blocks, 0.0))
    assert everything.pool == alone.pool
    assert alone.computed + alone.pool == whole.num_asked_blocks
    unbounded = run(whole, 2 * whole.num_distinct_blocks)
    assert everything.computed == unbounded.computed < alone.computed
    assert everything.seconds == pytest.approx(unbounded.seconds)
    part = run(whole, size, TierSpec("disk", whole.num_distinct_blocks // 4, 0.0))
    assert everything.computed < part.computed < alone.computed


def test_the_command_says_what_tiers_would_save(tmp_path: Path) -> None:
    arguments = ["simulate", "documents", "--blocks", "5%", "--policy", "lru", "--json", str(tmp_path / "figures.json")]
    result = CliRunner().invoke(app, [*arguments, "--tier", "host=20%@0.1", "--tier", "disk=100%@1"])
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "figures.json").read_text())
    (tiers,) = figures["tiers"]
    assert tiers["pool"] / figures["num_asked_blocks"] == pytest.approx(figures["rates"]["lru"][0])
    assert 0 < tiers["seconds"] < tiers["seconds_without"]
    assert set(tiers["loaded"]) == {"host", "disk"}
    assert "saved" in result.output


@pytest.mark.parametrize(
    "text",
    ["host", "host=5%", "=5%@1", "host=5%@-1", "host=5%@nan", "host=5%@inf", "host=@1", "host=0@1", "host=50%,20%@1"],
)
def test_a_malformed_tier_is_refused(text: str) -> None:
    """Of several sizes, the smallest used to be taken."""
    with pytest.raises(ValueError, match="--tier: expected"):
        simulate_trace(Console(quiet=True), "documents", "5%", "lru", None, [text], 1e-3)


def test_a_tier_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="--tier: 'a' is given twice"):
        simulate_trace(Console(quiet=True), "documents", "5%", "lru", None, ["a=5%@1", "a=6%@1"], 1e-3)
