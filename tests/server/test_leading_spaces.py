"""Texts of tokens keep their leading spaces where the tokenizer drops that of a text, as SentencePiece-style ones do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.client_payloads import post
from support.in_process_server import served
from support.model_zoo import build
from support.sentencepiece_tokenizer import sentencepiece_tokenizer

from radixkv import LLM, SamplingParams
from radixkv.outputs import Logprob
from radixkv.server.output.logprobs import TextLength, encode_completion_logprobs
from radixkv.server.output.token_text import TokenTexts

WORDS = ["▁Hello", "▁world", "ld", "</s>"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return sentencepiece_tokenizer()


@pytest.fixture(scope="module")
def spaced_llm(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("sentencepiece")
    build("llama", {"vocab_size": len(tokenizer), "bos_token_id": 1, "eos_token_id": 2}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    llm = LLM(str(folder), dtype="float32", num_blocks=64)
    yield llm
    llm.engine.cache.check()


def generation(tokenizer: Any) -> dict[str, Any]:
    """Fields of a request for an answer of `WORDS`, with special tokens in it."""
    bias = {f"{token_id}": 100 for token_id in tokenizer.convert_tokens_to_ids(WORDS)}
    return {"max_tokens": 24, "temperature": 5, "seed": 3, "ignore_eos": True, "logit_bias": bias}


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize(
    "prompt", ["Hello world Hello", "<s>Hello wörld", "w", ["<s>", "▁Hello", "</s>", "▁world"], ["<s>"]]
)
async def test_offsets_of_tokens_are_where_their_texts_are(
    spaced_llm: LLM, tokenizer: Any, prompt: str | list[str], echo: bool, skip_special_tokens: bool
) -> None:
    """Tokens used to lose their spaces, and a special token that is not in the text moved all offsets after it."""
    async with served(spaced_llm) as client:
        sent = prompt if isinstance(prompt, str) else tokenizer.convert_tokens_to_ids(prompt)
        fields = {"prompt": sent, "echo": echo, "skip_special_tokens": skip_special_tokens, "logprobs": 2}
        answer = await post(client, "/v1/completions", fields | generation(tokenizer))
        (choice,) = answer["choices"]
        text, logprobs = choice["text"], choice["logprobs"]
        assert " world" in logprobs["tokens"]
        assert " Hello" in logprobs["tokens"]
        assert "</s>" in logprobs["tokens"]
        end = 0
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            if token.startswith("bytes:"):
                assert (offset, text[offset]) == (end, "ö")
                continue
            end += text[end] == "ö"
            assert offset == end
            # Special tokens may be left out, and the text may lack the space before its first word.
            shown = [token] if token not in ("<s>", "</s>") else [token, ""]
            if token.startswith(" ") and text[:offset] in ("", "<s>"):
                shown.append(token[1:])
            (end,) = [offset + len(each) for each in shown if text.startswith(each, offset)][:1]
        assert end == len(text)


async def test_bytes_of_chat_log_probabilities_are_the_content(spaced_llm: LLM, tokenizer: Any) -> None:
    """Content " world world" used to have the bytes "worldworld"."""
    fields = generation(tokenizer)
    del fields["logit_bias"][f"{tokenizer.convert_tokens_to_ids('</s>')}"]
    async with served(spaced_llm) as client:
        body = {"messages": [{"role": "user", "content": "Hello"}], "logprobs": True, **fields}
        answer = await post(client, "/v1/chat/completions", body)
        (choice,) = answer["choices"]
        content = choice["message"]["content"]
        assert content.startswith((" world", " Hello"))
        tokens = choice["logprobs"]["content"]
        assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == content
        assert "".join(token["token"] for token in tokens) == content


def test_words_with_and_without_a_space_are_apart_in_top_logprobs(tokenizer: Any) -> None:
    """They are keyed by text: "▁H" and "H" used to be one."""
    texts = TokenTexts(tokenizer)
    ids = tokenizer.convert_tokens_to_ids(["▁H", "H", "▁"])
    entries = {token_id: Logprob(-1.0, rank, None) for rank, token_id in enumerate(ids, start=1)}
    encoded = encode_completion_logprobs([(ids[0], entries)], 3, TextLength(texts), texts)
    assert json.loads(encoded.encoded)["top_logprobs"] == [{" H": -1.0, "H": -1.0, " ": -1.0}]


async def test_token_strs_have_their_spaces(spaced_llm: LLM) -> None:
    async with served(spaced_llm) as client:
        answer = await post(client, "/tokenize", {"prompt": "Hello world  é!", "return_token_strs": True})
        strings = ["<s>", " Hello", " world", " ", " ", "bytes:\\xc3", "bytes:\\xa9", "!"]
        assert answer["token_strs"] == strings


def test_decoded_tokens_have_their_spaces(spaced_llm: LLM, tokenizer: Any) -> None:
    (world,) = tokenizer.convert_tokens_to_ids(["▁world"])
    params = SamplingParams(max_tokens=2, temperature=0, logprobs=0, prompt_logprobs=0, logit_bias={world: 100.0})
    (output,) = spaced_llm.generate(["Hello world"], params, use_tqdm=False)
    reported = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert [next(iter(entries.values())).decoded_token for entries in reported] == [" Hello", *[" world"] * 3]


def test_the_space_added_to_a_prompt_is_its_first(tokenizer: Any) -> None:
    """Also where the prompt begins with spaces of its own; each text after a special token gets one."""
    texts = TokenTexts(tokenizer)
    for prompt, offsets in [("  Hello", [0, 0, 0, 1]), ("<s> w<s>w", [0, 3, 3, 3, 5, 8]), ("  ", [0, 0, 0, 1])]:
        ids = tokenizer(prompt)["input_ids"]
        length, found = TextLength(texts, ids, echoed=prompt), []
        for token_id in ids:
            found.append(length.characters)
            length.add(token_id)
        assert (found, length.characters) == (offsets, len(prompt)), tokenizer.convert_ids_to_tokens(ids)


def test_an_answer_may_begin_with_a_space_that_is_not_shown(tokenizer: Any) -> None:
    world, bos = tokenizer.convert_tokens_to_ids(["▁world", "<s>"])
    for prompt, skip, expected in [([world], True, 12), ([bos], True, 11), ([bos], False, 12), ([], True, 11)]:
        length = TextLength(TokenTexts(tokenizer), prompt, skip_special_tokens=skip)
        length.add(world)
        length.add(world)
        assert length.characters == expected


def test_an_explanation_shows_where_tokens_begin_words(spaced_llm: LLM, tokenizer: Any) -> None:
    """The prompts differ in `▁world` and `ld`, which used to be shown both without a space."""
    ids = tokenizer.convert_tokens_to_ids(WORDS[:3])
    stem = ids[:1] * 20
    spaced_llm.generate({"prompt_token_ids": [*stem, ids[2], ids[0]]}, SamplingParams(max_tokens=1), use_tqdm=False)
    difference = spaced_llm.explain({"prompt_token_ids": [*stem, ids[1], ids[0]]}).difference
    assert difference is not None
    assert (difference.prompt[0], difference.cached[0]) == (" world", "ld")
