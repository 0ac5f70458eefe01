"""Structural tags: free text, except that what follows a trigger is constrained. (The form is vLLM's and XGrammar's.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixkv.sampling.json_schema.prepare import with_json_options


def structural_tag_grammar(tag: Any, prepare: Callable[[Any], Any]) -> str:
    """A structural tag in llguidance's format.

    Args:
        tag: ``{"triggers": [text], "structures": [{"begin": text, "schema": schema, "end": text}]}``.
        prepare: checks a schema and rewrites it, in place, for the compiler.

    Raises:
        ValueError: it is malformed, a schema is too large, or a structure begins with no trigger.
    """
    from llguidance import LLMatcher, StructTag

    if not isinstance(tag, dict) or set(tag) != {"triggers", "structures"}:
        raise ValueError(f"expected an object with 'triggers' and 'structures', got {tag!r:.80}")
    triggers, structures = tag["triggers"], tag["structures"]
    if not isinstance(triggers, list) or not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError(f"expected triggers to be a list of non-empty strings, got {triggers!r:.80}")
    if not isinstance(structures, list) or not structures:
        raise ValueError(f"expected structures to be a list with at least one element, got {structures!r:.80}")
    tags = []
    for structure in structures:
        if not isinstance(structure, dict) or set(structure) != {"begin", "schema", "end"}:
            raise ValueError(f"expected a structure with 'begin', 'schema' and 'end', got {structure!r:.80}")
        begin, end = structure["begin"], structure["end"]
        if not isinstance(begin, str) or not isinstance(end, str):
            raise ValueError(f"expected 'begin' and 'end' to be strings, got {begin!r:.80} and {end!r:.80}")
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise ValueError(f"expected 'begin' to start with one of the triggers, got {begin!r:.80}")
        schema = prepare(structure["schema"])
        if isinstance(schema, bool):
            raise ValueError(f"expected 'schema' to be an object, got {schema}")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=with_json_options(schema), end=end))
    # As text: special tokens are markers of the chat template, and no answer contains them.
    grammar: str = LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=False))
    return grammar
