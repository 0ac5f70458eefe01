"""Draws are those of the race and depend on their request alone; impossible parameters are refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.counted_reads import CountedReads

from radixkv.sampling import exponential, host_draw
from radixkv.sampling import logprobs as logprobs_module
from radixkv.sampling.logit_changes import LogitChanges
from radixkv.sampling.logprobs import SampledToken, with_logprobs
from radixkv.sampling.penalties import TokenCounts
from radixkv.sampling.sampler import SamplingState, changed_logits, sample
from radixkv.sampling.variates import SamplingRow, exponential_variates, rng_states
from radixkv.sampling_params import SamplingParams


def sampling_state(params: SamplingParams, changes: LogitChanges | None = None, **options: Any) -> SamplingState:
    usual = {"params": params, "seed": 1, "sample_index": 0, "prompt_token_ids": [0, 1]}
    return SamplingState(**{**usual, "changes": changes or LogitChanges(params), **options})


def variates(row: SamplingRow, ids: torch.Tensor) -> torch.Tensor:
    return exponential_variates(rng_states([row], ids.device), ids.unsqueeze(0))[0].double()


def test_a_step_reads_only_what_is_new_of_the_answer() -> None:
    """Penalties used to count the whole prompt and answer in every step."""
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.2, max_tokens=None)
    prompt, output = CountedReads(range(50)), CountedReads()
    changes = LogitChanges(params, bad_words=[[3, 4, 5]])
    state = sampling_state(params, changes, prompt_token_ids=prompt, output_token_ids=output)
    for step in range(200):
        logits = torch.randn(1, 90)
        plain = sampling_state(params, prompt_token_ids=list(prompt), output_token_ids=list(output))
        torch.testing.assert_close(changed_logits(logits, [state], [()]), changed_logits(logits, [plain], [()]))
        output.append((step * 7) % 90)
    assert output.num_read < 200 * 4
    assert prompt.num_read == 0


def test_tokens_are_counted_however_many_there_are() -> None:
    counts, output = TokenCounts([5, 3, 5]), [number % 150 for number in range(400)]
    for end in (0, 70, 71, 400):
        ids, times = counts.update(output[:end])
        assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == {3: 0, 5: 0} | Counter(output[:end])
    counts.rewind(output, 90)
    ids, times = counts.update(output[:90])
    assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == {3: 0, 5: 0} | Counter(output[:90])


@pytest.mark.parametrize(
    ("options", "forbidden", "expected"),
    [
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1}, [2], [False, False, False]),
        ({"presence_penalty": 0.5}, [], [True, True, True]),
        ({"logit_bias": {3: 1.0}}, [], [True, True, True]),
        ({"logprobs": 0}, [], [True, True, True]),
        ({"min_tokens": 2}, [2], [True, True, False]),
        ({"min_tokens": 2}, [], [False, False, False]),
    ],
)
def test_a_row_is_drawn_on_the_device_where_it_depends_on_logits_alone(
    options: dict[str, Any], forbidden: list[int], expected: list[bool]
) -> None:
    """Otherwise the next batch could be launched before this one's token is known to what changes the logits."""
    params = SamplingParams(**options)
    state = sampling_state(params, LogitChanges(params, forbidden))
    found = []
    for token_id in range(3):
        found.append(state.needs_host)
        state.output_token_ids.append(token_id)
    assert found == expected


def test_where_every_token_is_a_bad_word_none_is() -> None:
    params = SamplingParams(temperature=0, allowed_token_ids=[3, 4])
    state = sampling_state(params, LogitChanges(params, bad_words=[[3], [4]]))
    assert sample(torch.tensor([[9.0, 8.0, 7.0, 1.0, 2.0]]), [state])[0].token_id == 4


@pytest.mark.parametrize(
    ("allowed", "expected"), [([1, 2], 2), ([1], 1), ([2], 2), ([1, 3], 3), ([2, 3], 3), ([1, 2, 3], 3)]
)
def test_an_answer_ends_before_min_tokens_rather_than_with_a_bad_word(allowed: list[int], expected: int) -> None:
    """Bad words and end tokens were masked together: where nothing else was allowed, a bad word could be drawn."""
    params = SamplingParams(temperature=0, allowed_token_ids=allowed, min_tokens=2)
    state = sampling_state(params, LogitChanges(params, [2], [[1]]))
    assert sample(torch.tensor([[9.0, 8.0, 7.0, 6.0]]), [state])[0].token_id == expected


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -6.0])
    state = sampling_state(SamplingParams())
    counts = torch.zeros(5)
    for number in range(5000):
        state.sample_index = number
        counts[sample(logits.unsqueeze(0), [state])[0].token_id] += 1
    expected = logits.softmax(-1) * 5000
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 18.5  # the 0.999 quantile at 4 degrees of freedom


@pytest.mark.parametrize("vocab_size", [256, 257, 700, 1024])
def test_blocks_race_first_and_then_the_ids_of_the_one_that_won(vocab_size: int) -> None:
    logits = torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    rows = [SamplingRow(SamplingParams(temperature=(0.5, 2.0)[i % 2]), i, 0, i) for i in range(40)]
    token_ids = exponential.draw(logits, rows)
    for row_logits, row, token_id in zip(logits, rows, token_ids.tolist(), strict=True):
        blocks = (row_logits.double() / row.params.temperature).softmax(-1).split(256)
        masses = torch.stack([block.sum() for block in blocks])
        winner = int((masses / variates(row, -2 - torch.arange(len(blocks)))).argmax())
        ids = winner * 256 + torch.arange(len(blocks[winner]))
        assert token_id == ids[(blocks[winner] / variates(row, ids)).argmax()]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_rows=st.integers(1, 12),
    vocab_size=st.sampled_from([1, 7, 300, 9000]),
    spacing=st.sampled_from([None, 0.5, 4.0]),
    data=st.data(),
)
def test_of_what_is_left_the_winner_of_the_race_is_drawn(
    seed: int, num_rows: int, vocab_size: int, spacing: float | None, data: st.DataObject
) -> None:
    """Among equally likely tokens, those with the lowest ids are left."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    if spacing is not None:
        logits = (logits / spacing).round() * spacing
    kinds = st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.3, 1.0, 2.0]),
            "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.01]),
            "top_k": st.sampled_from([0, 1, 5, 60]),
            "min_p": st.sampled_from([0.0, 0.05, 1.0]),
        }
    )
    rows = [SamplingRow(SamplingParams(**data.draw(kinds)), seed + i, i % 2, i) for i in range(num_rows)]
    for i, (row, token_id) in enumerate(zip(rows, exponential.draw(logits, rows).tolist(), strict=True)):
        if not row.truncates:
            continue
        probs = (logits[i] / row.params.temperature).softmax(-1)
        order = (-probs).argsort(stable=True)
        ordered = probs[order]
        left = ordered >= row.params.min_p * ordered[0]
        if row.params.top_k:
            left[row.params.top_k :] = False
        total = float((ordered * left).sum())
        cumulative = (ordered * left).double().cumsum(-1)
        likelier = torch.cat((torch.zeros(1), cumulative[:-1]))
        # Where the sum is this close to the mass, rounding decides.
        sure = left & (likelier < row.params.top_p * total - 1e-5) if row.params.top_p < 1 else left
        possible = left & (likelier < row.params.top_p * total + 1e-5)
        sure[0] = possible[0] = True
        ratios = ordered.double() / variates(row, order)
        assert token_id in order[possible]
        assert float(ratios[order == token_id]) >= float(ratios[sure].max()) * (1 - 1e-4)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5])
def test_columns_for_a_gpu_begin_on_16_bytes(num_rows: int) -> None:
    """A kernel is compiled anew for a pointer that does not, and the first batch of that number of rows would wait for it."""
    rows = [
        SamplingRow(SamplingParams(temperature=0.5, top_p=0.9, top_k=i, min_p=0.1), i, 0, 0) for i in range(num_rows)
    ]
    columns = exponential._parameters(rows, 4, torch.device("cpu"))
    assert all(column.data_ptr() % 16 == 0 for column in columns.values())
    assert {name: column.tolist() for name, column in columns.items()} == {
        "temperatures": [0.5] * num_rows,
        "min_p": pytest.approx([0.1] * num_rows),
        "top_p": pytest.approx([0.9] * num_rows),
        "top_k": [4, 1, 2, 3, 4][:num_rows],
    }


def test_however_small_top_p_is_the_likeliest_token_is_left() -> None:
    """In float32 the smallest ones are 0."""
    assert 0.0 < torch.tensor(SamplingParams(top_p=1e-46).top_p, dtype=torch.float32).item() < 1e-20


@pytest.mark.parametrize("vocab_size", [300, 9000])  # sorted as a whole, or not, where there is no native code
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", [{"top_k": 3}, {"top_p": 0.01}])
def test_however_high_the_temperature_the_likeliest_tokens_are_left(
    monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any], native: bool, vocab_size: int
) -> None:
    """From 1e9 on, the tokens with the lowest ids were."""
    if not native:
        monkeypatch.setattr(host_draw, "library", lambda: None)
    logits = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0)) * 0.01
    rows = [SamplingRow(SamplingParams(temperature=1e30, **kind), seed, 0, 0) for seed in range(200)]
    left = host_draw.tokens_left(logits, rows[0]).nonzero()[0]
    assert set(left) == set(logits.topk(len(left)).indices.tolist())
    assert 3 <= len(left) < 0.02 * vocab_size
    drawn = set(exponential.draw(logits.expand(len(rows), -1), rows).tolist())
    assert drawn <= set(left)
    assert len(drawn) > len(left) // 3


@pytest.mark.parametrize("params", [SamplingParams(top_p=0.9), SamplingParams(top_k=3), SamplingParams()])
def test_a_row_that_is_no_numbers_disturbs_no_other(params: SamplingParams) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    rows = [SamplingRow(params, i, 0, 0) for i in range(5)]
    expected = exponential.draw(logits, rows).tolist()
    logits[2] = float("nan")
    found = exponential.draw(logits, rows).tolist()
    assert [*found[:2], *found[3:]] == [*expected[:2], *expected[3:]]
    assert 0 <= found[2] < 300


def test_draws_from_many_blocks_follow_the_distribution() -> None:
    """Some likely tokens in all blocks, the last of which is partial, and each block's other tokens together."""
    logits = torch.full((700,), -6.0)
    likely = [0, 3, 255, 256, 400, 511, 512, 699]
    logits[likely] = torch.tensor([1.0, 0.0, 2.0, -1.0, 1.5, 0.5, 0.0, 1.0])
    num_draws = 20_000
    rows = [SamplingRow(SamplingParams(), 7, 0, number) for number in range(num_draws)]
    token_ids = exponential.draw(logits.expand(num_draws, -1), rows)
    # Each likely token is a class of its own, the rest of a block another.
    classes = torch.arange(700) // 256 + len(likely)
    classes[likely] = torch.arange(len(likely))
    expected = torch.zeros(11).index_add_(0, classes, logits.softmax(-1)) * num_draws
    counts = torch.bincount(classes[token_ids], minlength=11)
    assert float(((counts - expected) ** 2 / expected).sum()) < 29.6  # the 0.999 quantile at 10 degrees of freedom


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    kinds = [{"temperature": 0.0}, {}, {"top_p": 0.8}, {"top_k": 7}, {"presence_penalty": 1.0}, {"logprobs": 3}]
    states = [sampling_state(SamplingParams(**kind), seed=i, output_token_ids=[i]) for i, kind in enumerate(kinds)]
    together = [token.token_id for token in sample(logits, states)]
    backwards = [token.token_id for token in sample(logits.flip(0), states[::-1])][::-1]
    alone = [sample(logits[i : i + 1], [states[i]])[0].token_id for i in range(6)]
    assert together == backwards == alone


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torchs_default_dtype_changes_no_draw_and_no_log_probability(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0))
    asked = [
        {"temperature": 0.7},
        {"temperature": 0.7, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.0, "logit_bias": {7: 0.3}},
        {"temperature": 1.3, "top_k": 40, "repetition_penalty": 1.1},
    ]
    answers = []
    for default in (torch.float32, dtype):
        torch.set_default_dtype(default)
        try:
            states = [sampling_state(SamplingParams(logprobs=3, **params)) for params in asked]
            answers.append(sample(logits.clone(), states))
        finally:
            torch.set_default_dtype(torch.float32)
    assert answers[0] == answers[1]


def test_logprobs_are_the_models_own_from_before_all_changes() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(temperature=0.0, logit_bias={9: 100.0}, logprobs=3)
    (token,) = sample(logits.unsqueeze(0), [sampling_state(params)])
    expected = logits.log_softmax(-1)
    assert token.token_id == 9
    assert token.logprob == pytest.approx(float(expected[9]), abs=1e-5)
    assert [entry[0] for entry in token.top_logprobs[:3]] == expected.topk(3).indices.tolist()
    assert token.top_logprobs[-1][2] == int((expected > expected[9]).sum()) + 1


def test_only_rows_that_ask_for_them_have_logprobs() -> None:
    states = [sampling_state(SamplingParams(temperature=0.0, logprobs=logprobs)) for logprobs in (None, 0, None)]
    plain, described, last = sample(torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]]), states)
    assert (plain, last) == (SampledToken(1), SampledToken(1))
    assert described.logprob == pytest.approx(-0.3132617)
    assert [(token_id, rank) for token_id, _, rank in described.top_logprobs] == [(0, 1)]


def test_logits_that_nothing_changes_are_not_copied() -> None:
    logits = torch.randn(2, 9)
    states = [sampling_state(SamplingParams()), sampling_state(SamplingParams(temperature=0.0))]
    assert changed_logits(logits, states, [(), ()]) is logits


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9, "logprobs": 2},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"temperature": 0.0, "repetition_penalty": 3.0},
        {"min_tokens": 5, "stop_token_ids": [3, 4]},
        {"logit_bias": {2: 4.0}, "allowed_token_ids": [1, 2, 3, 9]},
    ],
    ids=str,
)
def test_rows_of_drafts_are_drawn_as_if_the_drafts_had_been_appended(options: dict[str, Any]) -> None:
    """Penalties and the end of min_tokens advance along the draft, and back: also the next call is as if nothing had been."""
    params = SamplingParams(seed=1, **options)
    logits = 2 * torch.randn(8, 12, generator=torch.Generator().manual_seed(5))
    drafts = [[8, 7, 7, 9, 2], []]

    def states() -> list[SamplingState]:
        made = [SamplingState(params, 1, i, [1, 2], LogitChanges(params, [3, 4], bad_words=[[7, 9]])) for i in range(2)]
        for state in made:
            sample(logits[7:], [state])  # counts what there is
            state.output_token_ids += [5, 7, 6]
        return made

    together = states()
    for _ in range(2):
        tokens = sample(logits[:7], together, drafts)
        first, second = states()
        expected = []
        for row, draft in enumerate([*drafts[0], None]):
            expected += sample(logits[row : row + 1], [first])
            if draft is not None:
                first.output_token_ids.append(draft)
        assert tokens == [*expected, *sample(logits[6:7], [second])]
        assert [state.output_token_ids for state in together] == [[5, 7, 6]] * 2
    again = [together[0], states()[0]]
    for state in again:
        state.output_token_ids.append(11)
    changed = changed_logits(logits[:1].repeat(2, 1), again, [(), ()])
    assert torch.equal(*changed)


@pytest.mark.parametrize("native", [True, False])
def test_each_row_has_as_many_likeliest_tokens_as_it_asks_for_and_its_own(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    if not native:
        monkeypatch.setattr(logprobs_module, "library", lambda: None)
    assert with_logprobs(torch.empty(0, 4), [], []) == []
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]] * 3)
    expected = logits[0].double().log_softmax(0).tolist()
    tokens = with_logprobs(logits, [0, 3, 1], [1, 2, 9])
    ranked = [[(token_id, rank) for token_id, _, rank in token.top_logprobs] for token in tokens]
    assert ranked == [[(0, 1)], [(0, 1), (1, 2), (3, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)]]
    for token in tokens:
        assert token.logprob == pytest.approx(expected[token.token_id], abs=1e-6)
        for token_id, logprob, _ in token.top_logprobs:
            assert logprob == pytest.approx(expected[token_id], abs=1e-6)
