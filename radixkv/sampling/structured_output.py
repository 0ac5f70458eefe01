"""Structured output: before each token is sampled, the tokens that the grammar does not allow next are masked.

llguidance (Microsoft) parses the output and computes which tokens are allowed: a derivative-based lexer under an Earley
parser, walked along a trie of the vocabulary. It refuses schemas that nothing can satisfy, or that it cannot enforce
exactly, when they are compiled, and its work per token is bounded.

::

    GrammarCompiler   one per model: specification -> GrammarState, cached
      GrammarState    one per sequence: which tokens may come next. Forked with its sequence; preemption keeps it
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.errors import StructuredOutputError
from radixkv.model.loader import LoadedModel
from radixkv.sampling_params import StructuredOutputsParams
from radixkv.tools.grammar import AnswerFrame

if TYPE_CHECKING:
    import llguidance

# Compile time grows with the square of a regular expression's length: 0.2 s for the longest allowed.
_MAX_REGEX_CHARACTERS = 8_192
_MAX_CHARACTERS = 131_072
# In an ambiguous grammar the number of parses grows with the text. This many take a millisecond or two; a schema of sixty
# properties, each an alternative of objects, needs under 2,000.
_MAX_ITEMS_PER_TOKEN = 20_000
_MAX_COMPILED_GRAMMARS = 64
# Between the elements of JSON. Where unlimited whitespace is allowed, small models generate nothing else.
_JSON_WHITESPACE = " ?"
# The kind of what only a frame constrains.
_NOTHING = "nothing"


class GrammarState:
    """The parser state of one sequence in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def fork(self) -> GrammarState:
        """An independent copy of this state."""
        return GrammarState(self._matcher.deep_copy())

    def advance(self, token_id: int) -> None:
        """Consume the token that was appended to the sequence."""
        self._matcher.consume_token(token_id)

    @property
    def complete(self) -> bool:
        """Whether no token can follow: the answer was ended, or the grammar allows no continuation."""
        return bool(self._matcher.is_stopped())

    @property
    def failure(self) -> StructuredOutputError | None:
        """Why parsing failed: a token needed more work than the limit; None: it has not."""
        if not self._matcher.is_error():
            return None
        return StructuredOutputError(f"structured_outputs: {_one_line(self._matcher.get_error())}")

    def fill_bitmask(self, bitmask: NDArray[np.int32], row: int) -> None:
        """Set the bits of the allowed next tokens in one row of ``bitmask``, ``[rows, ceil(vocabulary / 32)]``."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, bitmask, row)


def apply_grammar_bitmask(logits: torch.Tensor, states: Mapping[int, GrammarState]) -> None:
    """Set the logits of tokens that the grammars do not allow to minus infinity, in place.

    Args:
        logits: float32 ``[rows, vocabulary]``.
        states: by row; the other rows are unchanged.
    """
    vocab_size = logits.shape[1]
    bitmask = np.full((len(states), -(-vocab_size // 32)), -1, dtype=np.int32)
    for index, state in enumerate(states.values()):
        state.fill_bitmask(bitmask, index)
    disallowed = np.unpackbits(bitmask.view(np.uint8), axis=1, count=vocab_size, bitorder="little") == 0
    rows = list(states)
    logits[rows] = logits[rows].masked_fill(torch.from_numpy(disallowed).to(logits.device), float("-inf"))


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary. Thread-safe."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled = lru_cache(maxsize=_MAX_COMPILED_GRAMMARS)(self._compile)

    def compile(self, spec: StructuredOutputsParams) -> GrammarState:
        """The state of a sequence that has generated nothing yet.

        Raises:
            ValueError: the specification is malformed, nothing can satisfy it, it uses what cannot be enforced, or it is too
                large; or the model has no tokenizer.
        """
        kind, text = _kind_and_text(spec)
        return self._compiled(kind, text, None if spec.frame is None else _frame_text(spec.frame)).fork()

    def _compile(self, kind: str, text: str, frame: str | None) -> GrammarState:
        from llguidance import LLMatcher, LLParserLimits

        # Compiling releases the GIL. Only one thread may build the trie of the vocabulary.
        with self._lock:
            self._tokenizer = self._tokenizer or self._make_tokenizer()
        grammar = "" if kind == _NOTHING else _grammar(kind, text)
        if frame is not None:
            grammar = _framed(frame, grammar)
        limits = LLParserLimits(step_max_items=_MAX_ITEMS_PER_TOKEN, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        # The first bitmask reveals grammars that allow no token at all.
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            name = f"structured_outputs: {kind}" if kind != _NOTHING else "tools: a schema of their parameters"
            raise ValueError(f"{name} cannot be followed: {_one_line(matcher.get_error())}")
        return GrammarState(matcher)

    def _make_tokenizer(self) -> llguidance.LLTokenizer:
        try:
            import llguidance.hf
        except ImportError as error:
            raise ValueError("structured_outputs: this needs llguidance: pip install 'radixkv[server]'") from error
        loaded = self._loaded
        return llguidance.hf.from_tokenizer(
            loaded.require_tokenizer(), n_vocab=loaded.vocab_size, eos_token=sorted(loaded.eos_token_ids) or None
        )


def _kind_and_text(spec: StructuredOutputsParams) -> tuple[str, str]:
    """The kind of specification, and its text; together the key of the cache."""
    if spec.json is not None:
        schema = spec.json if isinstance(spec.json, str) else _dump_schema(spec.json)
        kind, text = "json", schema
    elif spec.json_object:
        kind, text = "json", '{"type": "object"}'
    elif spec.choice is not None:
        kind, text = "choice", "|".join(re.escape(choice) for choice in spec.choice)
    elif spec.regex is not None:
        kind, text = "regex", spec.regex
    elif spec.grammar is not None:
        kind, text = "grammar", spec.grammar
    else:
        kind, text = _NOTHING, ""
    limit = _MAX_REGEX_CHARACTERS if kind in ("regex", "grammar") else _MAX_CHARACTERS
    if len(text) > limit:
        raise ValueError(f"structured_outputs: {kind} has {len(text)} characters, expected at most {limit}")
    return kind, text


def _frame_text(frame: AnswerFrame) -> str:
    """A frame as llguidance's list of grammars without ``@content``; the key of the cache, too."""
    try:
        for schema in frame.schemas.values():
            _check_schema(schema)
        schemas = [{"name": name, "json_schema": schema} for name, schema in frame.schemas.items()]
        text = json.dumps([{"name": "answer", "lark_grammar": frame.lark}, *schemas])
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"tools: a schema of their parameters cannot be read: {_one_line(str(error))}") from error
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"tools: they have {len(text)} characters as a grammar, expected at most {_MAX_CHARACTERS}")
    return text


def _framed(frame: str, content: str) -> str:
    """A frame with the grammar of the content in llguidance's format, or "" where there is none."""
    grammars = json.loads(frame)
    if content.startswith("{"):
        inner = json.loads(content)["grammars"]
        grammars += [{**inner[0], "name": "content"}, *inner[1:]]
    elif content:
        grammars.append({"name": "content", "lark_grammar": content})
    return json.dumps({"grammars": grammars})


def _grammar(kind: str, text: str) -> str:
    """The specification in llguidance's format."""
    from llguidance import LLMatcher

    try:
        if kind == "json":
            schema = json.loads(text)
            _check_schema(schema)
            # Only object schemas accept options; the schemas true and false allow everything and nothing.
            if isinstance(schema, bool):
                return LLMatcher.grammar_from_json_schema(text)
            return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _JSON_WHITESPACE})
        if kind in ("regex", "choice"):
            return LLMatcher.grammar_from_regex(text)
        return LLMatcher.grammar_from_lark(_lark(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs: {kind} cannot be read: {_one_line(str(error))}") from error


def _lark(text: str) -> str:
    """A grammar in Lark's syntax, from that or from GBNF."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # the converter raises plain Exception
        raise ValueError(str(error)) from error


def _check_schema(schema: Any) -> None:
    """Limit the length of regular expressions and names within a schema, which cost as much as others."""
    if not isinstance(schema, dict | bool):
        raise ValueError(f"expected a JSON schema, an object or a boolean, got {type(schema).__name__}")
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            longest = max((len(text) for text in (*part, part.get("pattern")) if isinstance(text, str)), default=0)
            if longest > _MAX_REGEX_CHARACTERS:
                raise ValueError(
                    f"a name or pattern has {longest} characters, expected at most {_MAX_REGEX_CHARACTERS}"
                )
            pending.extend(part.values())
        elif isinstance(part, list):
            pending.extend(part)


def _dump_schema(schema: Any) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs: json is no JSON schema: {error}") from error


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
