"""Incremental text equals the text of all tokens, and stop strings are found at any position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.model_zoo import build
from support.sentencepiece_tokenizer import sentencepiece_tokenizer
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from radixkv import LLM, BeamSearchParams, SamplingParams
from radixkv.sampling.detokenizer import IncrementalDetokenizer, answer_text
from radixkv.server.output.token_text import TokenTexts

TEXTS = ["Hello, world! ", "naïve café ", "日本語のテキスト", "👩‍👩‍👧 family 🎉", "  two spaces\n\ttab", "Привет, мир"]


def stream(detokenizer: IncrementalDetokenizer, token_ids: Sequence[int]) -> list[str]:
    """What each token adds to the streamed text, and last what is left at the end."""
    pieces = []
    for token_id in token_ids:
        detokenizer.append([token_id])
        pieces.append(detokenizer.delta())
    detokenizer.finish()
    return [*pieces, detokenizer.delta()]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4), cut=st.integers(0, 3))
def test_deltas_add_up_to_the_full_text(default_tokenizer: Any, parts: list[str], cut: int) -> None:
    ids = default_tokenizer("".join(parts), add_special_tokens=False)["input_ids"]
    ids = ids[: len(ids) - cut]  # may end inside a character
    detokenizer = IncrementalDetokenizer(default_tokenizer)
    pieces = stream(detokenizer, ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces[:-1])
    assert "".join(pieces) == detokenizer.text == default_tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_a_tokenizer_that_changes_its_text_does_so(default_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shouting(PreTrainedTokenizerFast):  # type: ignore[misc]
        def _decode(self, *arguments: Any, **options: Any) -> str:
            return str(super()._decode(*arguments, **options)).upper()

    ids = default_tokenizer.encode("four, five")
    assert answer_text(Shouting(tokenizer_object=default_tokenizer.backend_tokenizer), [], ids) == "FOUR, FIVE"
    decode = default_tokenizer.decode
    monkeypatch.setattr(default_tokenizer, "decode", lambda *args, **options: decode(*args, **options).title())
    assert answer_text(default_tokenizer, [], ids) == "Four, Five"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), parts=st.lists(st.sampled_from([*TEXTS, "<|im_end|>"]), min_size=1, max_size=4))
def test_text_is_the_same_however_seldom_it_is_read(
    default_tokenizer: Any, data: st.DataObject, parts: list[str]
) -> None:
    """Against a detokenizer that must read every token at once, because it looks for a stop string."""
    ids = default_tokenizer("".join(parts), add_special_tokens=False)["input_ids"]
    often, seldom = IncrementalDetokenizer(default_tokenizer, stop=["\0"]), IncrementalDetokenizer(default_tokenizer)
    pieces = ""
    for token_id in ids:
        often.append([token_id])
        seldom.append([token_id])
        if data.draw(st.booleans()):
            pieces += seldom.delta()
            assert pieces == seldom.text == often.text
    often.finish()
    seldom.finish()
    assert pieces + seldom.delta() == seldom.text == often.text


@pytest.fixture(scope="module")
def broken_token_ids(default_tokenizer: Any) -> list[int]:
    """Tokens that are not whole characters."""
    characters = default_tokenizer.batch_decode([[token_id] for token_id in range(len(default_tokenizer))])
    return [token_id for token_id, text in enumerate(characters) if "\N{REPLACEMENT CHARACTER}" in text]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_tokens_at_all_give_the_text_of_them_all(
    default_tokenizer: Any, broken_token_ids: list[int], data: st.DataObject
) -> None:
    """Incomplete characters, bytes that never complete one, special tokens between the two, and unknown tokens."""
    special = [*default_tokenizer.all_special_ids, 10 * len(default_tokenizer)]
    kinds = st.sampled_from([broken_token_ids, broken_token_ids, special, range(200, 2000)])
    tokens = kinds.flatmap(st.sampled_from)
    runs = data.draw(st.lists(st.tuples(tokens, st.sampled_from([1, 1, 1, 2, 3, 40])), max_size=60))
    ids = [token_id for token_id, count in runs for _ in range(count)]
    for stop in ([], ["\0"]):
        for skip in (True, False):
            detokenizer = IncrementalDetokenizer(default_tokenizer, skip_special_tokens=skip, stop=stop)
            assert "".join(stream(detokenizer, ids)) == default_tokenizer.decode(ids, skip_special_tokens=skip)


class CountingTokenizer:
    """Notes how many tokens are decoded."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.num_decoded += len(token_ids)
        text: str = self._tokenizer.decode(token_ids, **options)
        return text


@pytest.mark.parametrize("text", ["half a character", "special tokens", "words"])
@pytest.mark.parametrize("stop", [[], ["never"]])
def test_work_grows_with_the_tokens_and_no_faster(default_tokenizer: Any, text: str, stop: list[str]) -> None:
    """Bytes that never complete a character, and tokens without text, used to be decoded again with every later token."""
    (half,) = default_tokenizer.convert_tokens_to_ids(["\u00f0"])  # byte-level for 0xf0, the first of four
    token_id = {"half a character": half, "special tokens": default_tokenizer.eos_token_id, "words": 300}[text]
    tokenizer = CountingTokenizer(default_tokenizer)
    detokenizer = IncrementalDetokenizer(tokenizer, stop=stop)
    stream(detokenizer, [token_id] * 500)
    assert tokenizer.num_decoded < 500 * 40


def test_a_fork_and_its_origin_go_on_apart(default_tokenizer: Any) -> None:
    first, second, end = (default_tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a b", " c", "d"))
    for stop in ([], ["cd"]):
        origin = IncrementalDetokenizer(default_tokenizer, stop=stop)
        origin.append(first)
        fork = origin.fork()
        fork.append(second)
        assert origin.append(end) is None
        assert fork.append(end) == (stop[0] if stop else None)
        assert (origin.text, fork.text) == ("a bd", "a b " if stop else "a b cd")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", [["two"], ["o, t"], ["three", "wo"], ["one, two, three"]])
def test_a_stop_string_truncates_the_text_and_is_never_streamed(
    default_tokenizer: Any, stop: list[str], include: bool
) -> None:
    text = "zero one, two, three, four"
    ids = default_tokenizer(text, add_special_tokens=False)["input_ids"]
    detokenizer = IncrementalDetokenizer(default_tokenizer, stop=stop, include_stop_str_in_output=include)
    streamed, hit = "", None
    for token_id in ids:
        hit = detokenizer.append([token_id])
        streamed += detokenizer.delta()
        if hit is not None:
            break
    end, first = min((text.index(string) + len(string), string) for string in stop if string in text)
    assert hit == first
    assert detokenizer.text == streamed == text[: end if include else end - len(first)]


@pytest.mark.parametrize("stop", [["world", "wor", "ld"], ["ld", "wor", "world"]])
def test_of_stop_strings_in_one_token_the_one_that_ends_first_counts(default_tokenizer: Any, stop: list[str]) -> None:
    detokenizer = IncrementalDetokenizer(default_tokenizer, stop=stop)
    hello, world = default_tokenizer("Hello world", add_special_tokens=False)["input_ids"]
    assert [detokenizer.append([hello]), detokenizer.append([world])] == [None, "wor"]
    assert detokenizer.text == "Hello "


@pytest.mark.parametrize("other", [[], ["Z" * 20]])
def test_a_stop_string_that_was_text_before_min_tokens_stays_text(default_tokenizer: Any, other: list[str]) -> None:
    """Also beside other stop strings: with a longer one, the end of the earlier text used to be searched for all of them."""
    detokenizer = IncrementalDetokenizer(default_tokenizer, stop=["two", *other])
    ids = default_tokenizer("one, two, three, two", add_special_tokens=False)["input_ids"]
    assert detokenizer.append(ids[:3], may_stop=False) is None
    assert detokenizer.text == "one, two"
    assert [detokenizer.append([token_id]) for token_id in ids[3:]] == [None] * (len(ids) - 4) + ["two"]
    assert detokenizer.text == "one, two, three, "


def sentencepiece_style() -> Any:
    """A tokenizer that drops the leading space of a text, as Llama 2's and Mistral's do."""
    vocabulary = {"<unk>": 0, **{word: i for i, word in enumerate(["▁The", "▁sea", "▁is", "▁blue", "ish"], start=1)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.fixture(scope="module")
def byte_fallback() -> Any:
    """A tokenizer that writes characters which it lacks as bytes, as Llama 2's, Mistral's and Gemma's do."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh", "▁the", "▁a", "é"]
    model = tokenizers.models.BPE(
        {word: token_id for token_id, word in enumerate(words)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def read_in_every_way(tokenizer: Any, ids: list[int]) -> set[str]:
    """At once, token by token, as a stream, and each of them with every token checked for a stop string."""
    texts = set()
    for stop in ([], ["\0"]):
        streamed = IncrementalDetokenizer(tokenizer, [tokenizer.convert_tokens_to_ids("▁the")], stop=stop)
        at_once, one_by_one = streamed.fork(), streamed.fork()
        assert "".join(stream(streamed, ids)) == streamed.text
        assert at_once.append(ids) is None
        assert [one_by_one.append([token_id]) for token_id in ids] == [None] * len(ids)
        texts.add(streamed.text)
        for whole in (at_once, one_by_one):
            whole.finish()
            texts |= {whole.text, whole.delta()}
    return texts


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(), runs=st.lists(st.tuples(st.sampled_from("a b😀本éü\n"), st.sampled_from([1, 1, 2, 30])), max_size=8)
)
def test_characters_in_bytes_are_whole_however_they_are_read(
    byte_fallback: Any, data: st.DataObject, runs: list[tuple[str, int]]
) -> None:
    """A character after another one used to be lost, and one in which an answer was cut took all next to it."""
    text = "".join(character * count for character, count in runs)
    ids = byte_fallback(text, add_special_tokens=False)["input_ids"]
    assert read_in_every_way(byte_fallback, ids) == {text}
    (cut_text,) = read_in_every_way(byte_fallback, ids[: data.draw(st.integers(0, len(ids)))])
    whole = cut_text.rstrip("\N{REPLACEMENT CHARACTER}")
    assert text.startswith(whole)
    assert len(cut_text) - len(whole) <= 3


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(3, 270), max_size=60))  # without byte 0, which is the stop string
def test_any_bytes_are_the_same_text_however_they_are_read(byte_fallback: Any, ids: list[int]) -> None:
    assert len(read_in_every_way(byte_fallback, ids)) == 1


def test_an_answer_starts_with_the_space_that_separates_it_from_its_prompt() -> None:
    tokenizer = sentencepiece_style()
    for prompt, answer, text in [([1, 2, 3], [4, 5], " blueish"), ([1, 2, 3, 4], [5], "ish"), ([], [4, 5], "blueish")]:
        detokenizer = IncrementalDetokenizer(tokenizer, prompt)
        assert "".join(stream(detokenizer, answer)) == detokenizer.text == text


@pytest.mark.parametrize("prompt", ["Hello", "Hello é", "Hello 漢字", "Hello é漢", "Hello 🎉🎉", "🎉"])
def test_an_answer_has_its_leading_space_whatever_characters_its_prompt_ends_with(prompt: str) -> None:
    """After two characters in bytes it used to be lost: the prompt's last tokens began within the first of them."""
    tokenizer = sentencepiece_tokenizer()
    prompt_ids = tokenizer(prompt)["input_ids"]
    answer_ids = tokenizer("world é", add_special_tokens=False)["input_ids"]
    assert answer_text(tokenizer, prompt_ids, answer_ids) == " world é"


def test_an_answer_to_an_incomplete_character_has_all_its_own_bytes(default_tokenizer: Any) -> None:
    ids = default_tokenizer("ab\N{GRINNING FACE}cd", add_special_tokens=False)["input_ids"]
    cut = next(i for i in range(len(ids)) if default_tokenizer.decode(ids[:i]).endswith("\N{REPLACEMENT CHARACTER}"))
    expected = default_tokenizer.decode(ids[cut:], clean_up_tokenization_spaces=False)
    assert answer_text(default_tokenizer, ids[:cut], ids[cut:]) == expected


def test_special_tokens_are_left_out_unless_asked_for(default_tokenizer: Any) -> None:
    ids = default_tokenizer("Hi<|im_end|>", add_special_tokens=False)["input_ids"]
    texts = [answer_text(default_tokenizer, [], ids, skip_special_tokens=skip) for skip in (True, False)]
    assert texts == ["Hi", "Hi<|im_end|>"]


@pytest.mark.parametrize(("skip", "text"), [(True, "Hi<|im_end|>"), (False, "<|im_start|>Hi<|im_end|>")])
def test_some_special_tokens_may_stay_where_others_are_left_out(default_tokenizer: Any, skip: bool, text: str) -> None:
    ids = default_tokenizer("<|im_start|>Hi<|im_end|>", add_special_tokens=False)["input_ids"]
    shown = [default_tokenizer.convert_tokens_to_ids("<|im_end|>")]
    detokenizer = IncrementalDetokenizer(default_tokenizer, skip_special_tokens=skip, shown_special_tokens=shown)
    detokenizer.append(ids)
    assert detokenizer.text == text


def test_tokens_that_a_tokenizer_in_python_lacks_have_no_text() -> None:
    """ByT5's has 384, and raised in the middle of a step when a model with a wider head gave another."""
    tokenizer = ByT5Tokenizer()
    llm = LLM(build("llama", {"vocab_size": 600}), tokenizer=tokenizer, num_blocks=50)
    params = SamplingParams(max_tokens=40, seed=1, ignore_eos=True, logprobs=2, stop=["\0"])
    (output,) = llm.generate({"prompt_token_ids": [400, 75, 76]}, params, use_tqdm=False)
    (answer,) = output.outputs
    known = [token_id for token_id in answer.token_ids if token_id < len(tokenizer)]
    assert 0 < len(known) < len(answer.token_ids) == 40
    assert answer.text == tokenizer.decode(known, skip_special_tokens=True)
    assert answer.logprobs is not None
    for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert token_id < len(tokenizer) or entry[token_id].decoded_token == ""
    beams = llm.beam_search([{"prompt_token_ids": [400, 75]}], BeamSearchParams(beam_width=2, max_tokens=5))
    assert all(beam.text is not None for beam in beams[0].sequences)
    assert TokenTexts(tokenizer).chat_parts(400)[1] == ',"bytes":[]}'
    assert TokenTexts(tokenizer).is_left_out(400)
