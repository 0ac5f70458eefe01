"""`radixkv bench check` reports what became slower, but not noise or another machine's speed."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from radixkv.bench import check
from radixkv.bench.check import RESULTS, Case, Comparison, cases, compare, run_check
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.common.timing import Timing


def comparison(measured: Sequence[float], baselines: Sequence[float], committed: Timing | None = None) -> Comparison:
    """A comparison with a committed 10 us where the baseline took 100."""
    case = Case("row", committed or Timing(10.0, 10.0), 100.0, unmeasured, unmeasured)
    return Comparison(case, measured, baselines)


def unmeasured() -> Timing:
    raise AssertionError("it has been measured")


def test_a_row_that_takes_longer_is_worse() -> None:
    slower = comparison([15.0, 15.1, 14.9], [100.0, 100.0, 100.0])
    assert slower.ratio == pytest.approx(1.5)
    assert slower.is_worse(same_processor=True)
    assert slower.is_worse(same_processor=False)


def test_what_repetitions_differ_by_is_noise() -> None:
    assert not comparison([15.0, 9.0, 13.0], [100.0, 100.0, 100.0]).is_worse(same_processor=True)
    steady = comparison([13.0, 13.0, 13.0], [100.0, 100.0, 100.0])
    assert steady.is_worse(same_processor=True)
    # The committed rounds differed by a half.
    assert not comparison([13.0] * 3, [100.0] * 3, Timing(10.0, 6.6)).is_worse(same_processor=True)


def test_a_slow_machine_is_no_change() -> None:
    twice = comparison([20.0] * 3, [200.0] * 3)
    assert (twice.ratio, twice.time) == pytest.approx((1.0, 2.0))
    assert not twice.is_worse(same_processor=True)
    assert not twice.is_worse(same_processor=False)


def test_a_lucky_baseline_is_no_change_on_the_same_processor() -> None:
    lucky = comparison([10.0] * 3, [70.0] * 3)
    assert not lucky.is_worse(same_processor=True)
    assert lucky.is_worse(same_processor=False)


def test_rows_and_baselines_are_measured_in_turns() -> None:
    calls: list[str] = []

    def timing(name: str, values: Sequence[float]) -> Callable[[], Timing]:
        remaining = itertools.cycle(values)

        def measure() -> Timing:
            calls.append(name)
            return Timing(next(remaining), 1.0)

        return measure

    found = compare(Case("row", Timing(1, 1), 1, timing("ours", [1, 2, 3, 4, 5]), timing("baseline", [9])))
    assert calls == ["baseline", "ours"] * check.REPETITIONS
    assert found.measured == [1, 2, 3, 4, 5]
    assert found.baselines == [9] * 5


def test_every_fast_committed_row_is_checked() -> None:
    found = {case.name: case for case in cases(RESULTS)}
    rows = {row["name"]: row for row in json.loads((RESULTS / "cache.json").read_text())["rows"]}
    plans = json.loads((RESULTS / "plan.json").read_text())["rows"]
    assert len(found) == len(rows) - len(check.SLOW_ROWS) + len(plans)
    own = rows["insert_cold_4k"]
    assert found["insert_cold_4k"].committed == Timing(own["median_us"], own["min_us"])
    assert found["insert_cold_4k"].committed_baseline == own["hash_chain_median_us"]
    assert found["fork_16_of_4k"].committed_baseline == rows["match_hit_32k"]["hash_chain_median_us"]


@pytest.mark.parametrize(("cpu", "factor"), [("the same", 1.0), ("the same", 0.5), ("another", 1.0), ("another", 0.5)])
def test_it_says_what_became_slower_and_on_which_processor(
    cpu: str, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row measured at 10 us was committed as 10, or as 5."""
    machine = {"cpu": describe_machine()["cpu"] if cpu == "the same" else "8086"}
    (tmp_path / "cache.json").write_text(json.dumps({"machine": machine, "rows": []}))
    committed = Timing(10.0 * factor, 10.0 * factor)
    case = Case("the row", committed, 100.0, lambda: Timing(10.0, 10.0), lambda: Timing(100.0, 100.0))
    monkeypatch.setattr(check, "cases", lambda results: [case])
    printed = io.StringIO()
    assert run_check(Console(file=printed, width=300), tmp_path) is (factor == 1.0)
    assert ("slower the row: 2.00 times the committed ratio" in printed.getvalue()) is (factor == 0.5)
    assert ("another processor (8086;" in printed.getvalue()) is (cpu == "another")


def test_the_real_rows_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "REPETITIONS", 2)
    fork = next(case for case in cases(RESULTS) if case.name == "fork_16_of_4k")
    found = compare(fork)
    assert min(*found.measured, *found.baselines) > 0
