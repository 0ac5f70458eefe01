"""Compiles the constraints of requests on their answers into grammars over a model's vocabulary, by llguidance (Microsoft).

::

    GrammarCompiler   one per model: specification -> GrammarState, cached
      GrammarState    one per sequence: which tokens may come next. Forked with its sequence; preemption keeps it

Schemas that nothing can satisfy, or that the compiler cannot enforce exactly, are refused.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from radixkv.model.text_interface import TextInterface
from radixkv.sampling.grammar.answer_frames import checked_frame, frame_text, framed
from radixkv.sampling.grammar.budget import GrammarBudget
from radixkv.sampling.grammar.lark_parts import numbered_parts
from radixkv.sampling.grammar.specification import Specification
from radixkv.sampling.grammar.state import (
    TOO_MUCH_WORK,
    GrammarResources,
    GrammarState,
    error_in_words,
)
from radixkv.sampling.grammar.tokenizer import grammar_tokenizer
from radixkv.sampling.json_schema.prepare import (
    locate_refusal,
    not_to_compile,
    parts_with_more_names,
    parts_with_patterns,
    prepare_schema,
)
from radixkv.sampling.json_schema.unsatisfiable import decisive, leave_out_unsatisfiable, unsatisfiable_reference
from radixkv.sampling_params import StructuredOutputsParams
from radixkv.threads import run_with_deep_stack

if TYPE_CHECKING:
    import llguidance

# In an ambiguous grammar the number of parses grows with the text. This many take a millisecond or two; a schema of sixty
# properties, each an alternative of objects, needs under 2,000.
_MAX_ITEMS_PER_TOKEN = 20_000
# Of a position in the text: a thousand optional properties, the most that a schema may have, have 4,007 there.
_MAX_ITEMS_PER_ROW = 5_000
# Lexer states are made on demand, 1 to 2 kB each.
_MAX_LEXER_STATES = 50_000
# What the lexer may compute for one mask, and before the first one. With llguidance's own limits, 300 rules that all begin
# with the same letters took 920 ms for a mask, and 1.1 s before; common grammars, and schemas of 60 properties, need a tenth.
_MASK_FUEL = 30_000
_COMPILE_FUEL = 200_000
_MAX_COMPILED_GRAMMARS = 64
_MAX_CHECKED_SCHEMAS = 256


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary. Thread-safe.

    Args:
        processor_time: of the calling thread, in seconds.
        wall_time: in seconds.
        num_logits: of the model's output head; None: as many as its vocabulary has tokens, which is the most that counts.
    """

    def __init__(
        self,
        loaded: TextInterface,
        processor_time: Callable[[], float] = time.thread_time,
        wall_time: Callable[[], float] = time.perf_counter,
        *,
        num_logits: int | None = None,
    ) -> None:
        self._loaded = loaded
        self._num_logits = loaded.vocab_size if num_logits is None else min(num_logits, loaded.vocab_size)
        threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="radixkv-bitmasks")
        self._resources = GrammarResources(processor_time, wall_time, threads)
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled = lru_cache(maxsize=_MAX_COMPILED_GRAMMARS)(self._compile_deeply)
        # Of tools, whose schemas recur in many grammars.
        self._schema_refusal = lru_cache(maxsize=_MAX_CHECKED_SCHEMAS)(self._refusal_of_schema)

    def compile(self, spec: StructuredOutputsParams) -> GrammarState:
        """The state of a sequence that has generated nothing yet.

        Raises:
            ValueError: the specification is malformed, unsatisfiable, not enforceable, or too large; or the model has no
                tokenizer, one without a fast backend, or one whose end-of-sequence tokens it cannot generate.
            MissingPackageError: llguidance is not installed.
        """
        frame = None if spec.frame is None else frame_text(spec.frame)
        return self._compiled(Specification.of(spec), frame).for_request()

    def prepare(self) -> None:
        """Build the trie of the vocabulary, which the first grammar would otherwise have to wait for.

        It takes a second for a vocabulary of 50,000 tokens, during which no other thread runs. (Compiling lets others run.)

        Raises:
            ValueError: as `compile`, of the tokenizer.
            MissingPackageError: llguidance is not installed.
            Exception: llguidance does not support this kind of tokenizer.
        """
        self._prepared_tokenizer()

    def _prepared_tokenizer(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                tokenizer = self._loaded.require_tokenizer()
                self._tokenizer = grammar_tokenizer(tokenizer, self._num_logits, self._loaded.eos_token_ids)
            return self._tokenizer

    def _compile_deeply(self, spec: Specification | None, frame: str | None) -> GrammarState:
        # The compiler follows a schema's references recursively: 27 KB of stack for each.
        return run_with_deep_stack(partial(self._compile, spec, frame))

    def _compile(self, spec: Specification | None, frame: str | None) -> GrammarState:
        tokenizer = self._prepared_tokenizer()  # first: it raises if llguidance is not installed
        frame = None if frame is None else checked_frame(frame, self._schema_refusal)
        attempt = self._attempt(spec, frame, prepare_schema)
        if isinstance(attempt, str) and unsatisfiable_reference(attempt) is not None:
            again = self._attempt(spec, frame, self._prepared_again)
            attempt = decisive(attempt, again) if isinstance(again, str) else again
        if isinstance(attempt, str):
            name = "tools: their calls" if spec is None else f"structured_outputs: {spec.kind}"
            raise ValueError(f"{name} cannot be followed: {attempt}")
        return GrammarState(attempt, tokenizer.vocab_size, self._resources, GrammarBudget())

    def _attempt(
        self, spec: Specification | None, frame: str | None, prepare: Callable[[Any], Any]
    ) -> llguidance.LLMatcher | str:
        """The grammar of whole answers, compiled, or why it is refused.

        Args:
            frame: from `checked_frame`.
            prepare: see `Specification.grammar`.
        """
        content, schemas = ("", []) if spec is None else spec.grammar(prepare)
        reason = next(filter(None, map(not_to_compile, schemas)), None)
        if reason is None:
            whole = content if frame is None else framed(frame, content)
            matcher = _matcher(self._prepared_tokenizer(), whole)
            reason = self._refusal_of(matcher, schemas)
        if reason is None and spec is not None and spec.kind == "grammar":
            reason = TOO_MUCH_WORK if self._has_costly_part(content) else None
        if reason is None and frame is None and all(token in self._loaded.eos_token_ids for token in _allowed(matcher)):
            reason = "only the empty answer satisfies it"
        return matcher if reason is None else locate_refusal(schemas, reason)

    def _prepared_again(self, schema: Any) -> Any:
        """A schema for the compiler, without references to what nothing satisfies, by which it was refused."""
        schema = prepare_schema(schema)
        leave_out_unsatisfiable(schema, self._schema_refusal)
        return schema

    def _refusal_of_schema(self, text: str) -> str | None:
        """Why a schema, as JSON, is refused; None: it is not."""
        schema = json.loads(text)
        reason = not_to_compile(schema)
        if reason is not None:
            return reason
        return self._refusal_of(_matcher(self._prepared_tokenizer(), _grammar_of_schema(schema)), [schema])

    def _refusal_of(self, matcher: llguidance.LLMatcher, schemas: Sequence[Any]) -> str | None:
        """Why a grammar with these schemas in it is refused; None: it is not.

        Their patterns are also tried by themselves, because the cost of one shows only once its string has begun.
        """
        reason = _refusal(matcher)
        if reason is not None:
            return reason
        tokenizer = self._prepared_tokenizer()
        parts = itertools.chain.from_iterable(map(parts_with_patterns, schemas))
        begun = {_grammar_of_schema(part): begin for part, begin in parts}
        # What else is wrong with a pattern is found with its schema, and does not matter where no string of it can come.
        costly = _is_costly(matcher.deep_copy(), []) or any(
            _is_costly(_matcher(tokenizer, grammar), tokenizer.tokenize_str(begin)) for grammar, begin in begun.items()
        )
        if costly:
            return TOO_MUCH_WORK
        for part, begin in itertools.chain.from_iterable(map(parts_with_more_names, schemas)):
            alone = _matcher(tokenizer, _grammar_of_schema(part))
            tokens, quote = tokenizer.tokenize_str(begin), tokenizer.tokenize_str('"')
            # The compiler lets a comma follow, whether or not there is a name that may follow the comma.
            if alone.try_consume_tokens(tokens) == len(tokens) and not alone.try_consume_tokens(quote):
                patterns = ", ".join(part["properties"]["x"]["patternProperties"])
                return f"no name that is not among the properties matches patternProperties ({patterns:.80})"
        return None

    def _has_costly_part(self, grammar: str) -> bool:
        """Whether a rule or a regular expression of a grammar in Lark's syntax takes too much work where it begins."""
        from llguidance import LLMatcher

        tokenizer = self._prepared_tokenizer()
        grammar_of_parts, numbers = numbered_parts(grammar)
        matcher = _matcher(tokenizer, LLMatcher.grammar_from_lark(grammar_of_parts))
        if matcher.is_error():
            return False
        return any(_is_costly(matcher.deep_copy(), tokenizer.tokenize_str(number)) for number in numbers)


def _grammar_of_schema(schema: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _matcher(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """A grammar in llguidance's format, compiled; `_refusal` says whether that failed."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_items_in_row=_MAX_ITEMS_PER_ROW,
        step_max_items=_MAX_ITEMS_PER_TOKEN,
        max_lexer_states=_MAX_LEXER_STATES,
        step_lexer_fuel=_MASK_FUEL,
        initial_lexer_fuel=_COMPILE_FUEL,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    # The first bitmask reveals grammars that allow no token at all.
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def _is_costly(matcher: llguidance.LLMatcher, begin: list[int]) -> bool:
    """Whether the beginning of an answer and one more token, the first that is allowed, take too much work."""
    matcher.consume_tokens(begin)
    matcher.consume_token(next(_allowed(matcher), 0))
    matcher.compute_bitmask()
    return _refusal(matcher) == TOO_MUCH_WORK


def _allowed(matcher: llguidance.LLMatcher) -> Iterator[int]:
    """The tokens that may come next."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    return map(int, bits.nonzero()[0])


def _refusal(matcher: llguidance.LLMatcher) -> str | None:
    """Why a grammar is refused; None: it is not."""
    return error_in_words(matcher.get_error()) if matcher.is_error() else None
