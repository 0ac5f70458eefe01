"""How many drafts are verified: it depends on how often they prove right, and on how long rows take."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.drafting import Draft
from radixkv.drafting.acceptance import AcceptanceRates, RequestRates
from radixkv.drafting.lengths import choose_lengths
from radixkv.drafting.step_times import StepTimes


def times(**seconds: float) -> StepTimes:
    """Steps that took so long, by ``rows_<number>``."""
    learned = StepTimes()
    for _ in range(20):
        for name, value in seconds.items():
            learned.observe(int(name.removeprefix("rows_")), value, drafting=False)
    return learned


def test_while_rows_are_free_every_token_is_verified() -> None:
    assert choose_lengths([0.9, 0.1], [16, 3], 2, 2, times(rows_1=1.0, rows_32=1.0), 99) == [16, 3]


def test_nothing_is_drafted_before_anything_is_known_to_be_dear_or_where_there_is_no_room() -> None:
    assert choose_lengths([0.5], [4], 1, 1, StepTimes(), 99) == [4]
    assert choose_lengths([0.5], [4], 1, 1, StepTimes(), 0) == [0]
    assert choose_lengths([], [], 1, 1, StepTimes(), 9) == []


def test_where_rows_cost_in_proportion_only_what_is_nearly_certain_is_verified() -> None:
    """64 sequences side by side, on a machine that computes rows one after the other."""
    dear = times(rows_64=64.0, rows_128=128.0, rows_256=256.0)
    assert choose_lengths([0.7] * 64, [8] * 64, 64, 64, dear, 192) == [0] * 64
    dear = times(rows_64=64.0, rows_128=100.0, rows_256=172.0)  # a row costs 0.56
    lengths = choose_lengths([0.95] + [0.3] * 63, [8] * 64, 64, 64, dear, 192)
    assert lengths[0] >= 4
    assert lengths[1:] == [0] * 63


def test_the_best_drafts_get_the_rows() -> None:
    lengths = choose_lengths([0.9, 0.8, 0.2], [4, 4, 4], 3, 3, times(rows_1=1.0, rows_64=1.0), 5)
    assert lengths == [4, 1, 0]  # 0.9, 0.81, 0.8, 0.729, 0.656


def test_a_disturbed_step_is_no_lesson_and_a_slower_machine_is_one() -> None:
    learned = times(rows_4=1.0, rows_16=1.1)
    learned.observe(16, 100.0, drafting=False)
    assert learned.predict(np.array([16]))[0] < 1.5
    for _ in range(60):
        learned.observe(16, 3.0, drafting=False)
    assert learned.predict(np.array([16]))[0] == pytest.approx(3.0, rel=0.1)


def test_what_drafts_cost_besides_rows_is_learned_and_forgotten() -> None:
    """With 64 sequences, a step with any draft takes 1.1 times as long, more than two tokens that may be right save."""
    learned = times(rows_64=1.0)
    assert choose_lengths([0.9, 0.8], [1, 1], 64, 64, learned, 9) == [1, 1]
    for _ in range(8):
        learned.observe(66, 1.1, drafting=True)
    assert choose_lengths([0.9, 0.8], [1, 1], 64, 64, learned, 9) == [0, 0]
    assert choose_lengths([0.9] * 32, [8] * 32, 64, 64, learned, 99)[0] > 0
    for _ in range(2000):
        learned.observe(64, 1.0, drafting=False)
    assert choose_lengths([0.9, 0.8], [1, 1], 64, 64, learned, 9) == [1, 1]


def test_more_rows_never_take_less_time() -> None:
    learned = times(rows_1=2.0, rows_4=1.0, rows_16=3.0)
    predicted = learned.predict(np.arange(1, 200))
    assert (np.diff(predicted) >= 0).all()
    assert predicted[-1] > predicted[20]


def test_rates_are_learned_by_source_strength_and_request() -> None:
    rates, good, bad = AcceptanceRates(), RequestRates(), RequestRates()
    for _ in range(20):
        rates.learn("suffix", Draft([1, 2, 3], 8), [1, 2, 3, 4], good)
        rates.learn("suffix", Draft([1, 2, 3], 2), [9], bad)
    unknown = RequestRates()
    assert rates.rate("tree", 8, unknown) == 0.5
    assert rates.rate("suffix", 8, unknown) > 0.9 > 0.2 > rates.rate("suffix", 2, unknown)
    assert rates.rate("suffix", 8, bad) == rates.rate("suffix", 8, unknown)
    for _ in range(7):
        rates.learn("suffix", Draft([1], 8), [9], bad)
    assert rates.rate("suffix", 8, bad) < 0.5 < rates.rate("suffix", 8, good)


def test_what_comes_after_the_first_wrong_token_says_nothing() -> None:
    rates, request = AcceptanceRates(), RequestRates()
    for _ in range(100):
        rates.learn("a", Draft([1, 2, 3, 4, 5]), [1, 9], request)  # one right, one wrong
        rates.learn("b", Draft([1, 2, 3, 4, 5]), [1], request)  # one right, no more is known
    assert rates.rate("a", 0, RequestRates()) == pytest.approx(0.5, abs=0.02)
    assert rates.rate("b", 0, RequestRates()) > 0.95


def test_a_rate_is_that_of_its_tokens_with_little_weight_for_what_is_assumed() -> None:
    rates = AcceptanceRates()
    for source, tokens, expected in (("right", [1], 0.68), ("wrong", [9, 9, 9], 0.32)):
        request = RequestRates()
        rates.learn(source, Draft([1, 2, 3]), tokens, request)
        assert rates.rate(source, 0, request) == pytest.approx(expected)


def test_what_a_request_has_shown_long_ago_counts_little() -> None:
    rates, request = AcceptanceRates(), RequestRates()
    for came, least, most in ((1, 0.9, 1.0), (2, 0.0, 0.3)):
        for _ in range(64):
            rates.learn("a", Draft([1]), [came], request)
        assert least < rates.rate("a", 0, request) < most


def test_shared_rates_are_bounded_whatever_strengths_a_drafter_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.drafting.acceptance._MAX_SHARED", 2)
    rates = AcceptanceRates()
    for strength, kept in ((1, {1}), (2, {1, 2}), (2, {1, 2}), (3, {2, 3})):
        rates.learn("a", Draft([1], strength), [1], RequestRates())
        assert {strength for _, strength in rates._rates} == kept


def test_what_drafts_cost_is_not_unlearned_while_drafting_goes_on() -> None:
    """The steps that show the cost are not part of what they are compared with."""
    learned = times(rows_64=1.0)
    for _ in range(200):
        learned.observe(66, 1.3, drafting=True)
    without, with_drafts = learned.predict(np.array([64, 65]))
    assert with_drafts / without > 1.2
    assert without == pytest.approx(1.0)


def test_sizes_that_only_drafts_reach_are_learned_without_what_drafts_cost_besides() -> None:
    learned = times(rows_64=1.0)
    for _ in range(100):
        learned.observe(66, 1.3, drafting=True)
        learned.observe(300, 2.6, drafting=True)
    assert learned.predict(np.array([64, 300]))[1] == pytest.approx(2.6, rel=0.05)
    learned.observe(300, 2.0, drafting=False)
    assert learned.predict(np.array([300]))[0] == 2.0
