"""Log-probabilities in the forms of both endpoints, written as JSON (see `radixkv.server.output.encoding` for why)."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence

from pydantic import BaseModel

from radixkv.outputs import Logprob, PromptLogprobs
from radixkv.server.output.encoding import EncodedPart, EncoderThread
from radixkv.server.output.token_text import TokenTexts


class TokenLogprob(BaseModel):
    """A token, its log-probability and its bytes in UTF-8 text."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenTokenLogprob(TokenLogprob):
    """The chosen token, with the likeliest ones."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """One entry per token; no model here refuses, but the API's answers have the field."""

    content: list[ChosenTokenLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Log-probabilities, one entry per token; None for a prompt's first token, which nothing precedes."""

    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class EncodedChatLogprobs(EncodedPart, ChatLogprobs):
    """`ChatLogprobs` as JSON."""


class EncodedTokenLogprobs(EncodedPart):
    """A list of `ChosenTokenLogprob` as JSON."""

    @classmethod
    def join(cls, parts: Iterable[EncodedTokenLogprobs]) -> EncodedTokenLogprobs:
        """All of several lists."""
        return cls.of(b"[%b]" % b",".join(part.encoded[1:-1] for part in parts if part.encoded != b"[]"))


class EncodedCompletionLogprobs(EncodedPart, CompletionLogprobs):
    """`CompletionLogprobs` as JSON."""


def encode_chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], num_top: int, texts: TokenTexts
) -> EncodedChatLogprobs:
    """The chosen tokens, each with the ``num_top`` likeliest."""
    content = encode_token_logprobs(zip(token_ids, logprobs, strict=True), num_top, texts).encoded
    return EncodedChatLogprobs.of(b'{"content":%b,"refusal":null}' % content)


def encode_token_logprobs(
    chosen_tokens: Iterable[tuple[int, dict[int, Logprob]]], num_top: int, texts: TokenTexts
) -> EncodedTokenLogprobs:
    """Chosen tokens, each with the ``num_top`` likeliest."""
    tokens = []
    for token_id, entries in chosen_tokens:
        top = ",".join([_chat_entry(top_id, entry.logprob, texts) for top_id, entry in _likeliest(entries, num_top)])
        chosen = _chat_entry(token_id, entries[token_id].logprob, texts)
        tokens.append(f'{chosen[:-1]},"top_logprobs":[{top}]}}')
    return EncodedTokenLogprobs.of(f"[{','.join(tokens)}]".encode())


class TextLength:
    """How many characters a growing text has; a token may be only part of a character.

    Attributes:
        characters: how many are complete.

    Args:
        texts: of the tokens.
        prompt_token_ids: what the answer follows.
        echoed: the prompt's text, with which the text begins; its tokens are then added first. None: it does not.
        skip_special_tokens: whether special tokens are left out of the answer's text.
        shown_special_tokens: those that stay in it nevertheless.
    """

    def __init__(
        self,
        texts: TokenTexts,
        prompt_token_ids: Sequence[int] = (),
        *,
        echoed: str | None = None,
        skip_special_tokens: bool = True,
        shown_special_tokens: Sequence[int] = (),
    ) -> None:
        self.characters = 0
        self._texts = texts
        self._prompt_token_ids = prompt_token_ids
        self._echoed = echoed or ""
        self._num_echoed = 0 if echoed is None else len(prompt_token_ids)
        self._skip_special_tokens = skip_special_tokens
        self._shown_special_tokens = shown_special_tokens
        self._num_added = 0
        # Tokenizers may add a space to each text between special tokens.
        self._space_may_be_added = True
        self._answer_has_text = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> None:
        """Append a token."""
        is_echoed = self._num_added < self._num_echoed
        part = self._echoed_part(self._num_added) if is_echoed else self._answer_part(token_id)
        self._num_added += 1
        self.characters += len(self._decoder.decode(part))

    def _echoed_part(self, index: int) -> bytes:
        """A prompt's token as it is in the prompt's text, to which special tokens and spaces may have been added."""
        token_id = self._prompt_token_ids[index]
        part = bytes(self._texts.bytes_of(token_id))
        if self._texts.is_left_out(token_id):
            self._space_may_be_added = True
            return part if self._echoed.startswith(part.decode(errors="ignore"), self.characters) else b""
        added = self._space_may_be_added and part.startswith(b" ") and self._is_space_added(index)
        self._space_may_be_added = False
        return part[1:] if added else part

    def _is_space_added(self, index: int) -> bool:
        """Whether the text lacks one space that the tokens have, from this token up to the first that is not only spaces."""
        parts = []
        for following in range(index, self._num_echoed):
            token_id = self._prompt_token_ids[following]
            if self._texts.is_left_out(token_id):
                break
            parts.append(bytes(self._texts.bytes_of(token_id)))
            if parts[-1].strip(b" "):
                break
        text = b"".join(parts).decode(errors="ignore")
        here = self.characters
        return not self._echoed.startswith(text, here) and self._echoed.startswith(text[1:], here)

    def _answer_part(self, token_id: int) -> bytes:
        may_be_left_out = self._skip_special_tokens and token_id not in self._shown_special_tokens
        if may_be_left_out and self._texts.is_left_out(token_id):
            return b""
        part = bytes(self._texts.bytes_of(token_id))
        if part.startswith(b" ") and not self._answer_has_text:
            shown = self._texts.begins_with_space(
                token_id,
                self._prompt_token_ids,
                skip_special_tokens=self._skip_special_tokens,
                shown_special_tokens=self._shown_special_tokens,
            )
            part = part if shown else part[1:]
        self._answer_has_text = True
        return part


def encode_completion_logprobs(
    entries: Iterable[tuple[int, dict[int, Logprob] | None]], num_top: int, length: TextLength, texts: TokenTexts
) -> EncodedCompletionLogprobs:
    """Log-probabilities of tokens, each with the ``num_top`` likeliest and the chosen one.

    Args:
        length: of the text before them; their own is added.
    """
    offsets, tokens, chosen, likeliest = [], [], [], []
    for token_id, logprobs in entries:
        offsets.append(f"{length.characters}")
        tokens.append(texts.quoted(token_id))
        if logprobs is None:
            chosen.append("null")
            likeliest.append("null")
        else:
            chosen.append(_number(logprobs[token_id].logprob))
            # Of several tokens with the same text the chosen one counts, else the likeliest. As with OpenAI, the chosen one
            # is always among them.
            top: dict[str, str] = {}
            for top_id, entry in _likeliest(logprobs, num_top):
                top.setdefault(texts.quoted(top_id), _number(entry.logprob))
            top[tokens[-1]] = chosen[-1]
            likeliest.append(f"{{{','.join([f'{text}:{logprob}' for text, logprob in top.items()])}}}")
        length.add(token_id)
    encoded = (
        f'{{"text_offset":[{",".join(offsets)}],"tokens":[{",".join(tokens)}],'
        f'"token_logprobs":[{",".join(chosen)}],"top_logprobs":[{",".join(likeliest)}]}}'
    )
    return EncodedCompletionLogprobs.of(encoded.encode())


class EncodedPromptLogprobs(EncodedPart):
    """vLLM's form: for each token, by token id, log-probability, rank and text; null for the first."""


async def encode_prompt_logprobs(
    encoder: EncoderThread, logprobs: PromptLogprobs | None, num_top: int | None
) -> EncodedPromptLogprobs | None:
    """Log-probabilities of a prompt's tokens, each with the ``num_top`` likeliest, where ``logprobs`` may have more.

    Args:
        logprobs: None: there are none.
        num_top: None: the request does not include them.
    """
    if logprobs is None or num_top is None:
        return None

    def encode() -> EncodedPromptLogprobs:
        tokens = ["null" if entries is None else _prompt_entries(entries, num_top) for entries in logprobs]
        return EncodedPromptLogprobs.of(f"[{','.join(tokens)}]".encode())

    return await encoder.run(len(logprobs) * (1 + num_top), encode)


def _prompt_entries(entries: dict[int, Logprob], num_top: int) -> str:
    own = next(iter(entries))
    encoded = [
        f'"{token_id}":{{"logprob":{_number(entry.logprob)},"rank":{entry.rank},'
        f'"decoded_token":{json.dumps(entry.decoded_token)}}}'
        for token_id, entry in entries.items()
        if token_id == own or entry.rank <= num_top
    ]
    return f"{{{','.join(encoded)}}}"


def _likeliest(entries: dict[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    # The chosen token comes first, whatever its rank.
    return sorted(entries.items(), key=lambda entry: entry[1].rank)[:num_top]


def _chat_entry(token_id: int, logprob: float, texts: TokenTexts) -> str:
    start, end = texts.chat_parts(token_id)
    return f"{start}{_number(logprob)}{end}"


def _number(value: float) -> str:
    # JSON has no infinity; OpenAI's API and vLLM write this number for the least likely tokens.
    return repr(value) if value > -9999.0 else "-9999.0"
