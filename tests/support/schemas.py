"""Whether an answer in a JSON schema may be a certain value."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from radixkv import LLM, StructuredOutputsParams


def accepts(llm: LLM, schema: Any, value: Any) -> bool:
    """Whether an answer may be this value."""
    return accepts_text(llm, StructuredOutputsParams(json=schema), json.dumps(value, ensure_ascii=False))


def accepts_text(llm: LLM, spec: StructuredOutputsParams, text: str) -> bool:
    """Whether an answer may be this text."""
    token_ids = llm.get_tokenizer()(text, add_special_tokens=False)["input_ids"]
    state = llm.engine.grammars.compile(spec)
    bitmask = np.zeros((1, -(-state.num_tokens // 32)), dtype=np.int32)
    for token_id in [*token_ids, llm.get_tokenizer().eos_token_id]:
        state.fill_bitmask(bitmask, 0)
        assert state.failure is None
        if state.complete:
            return token_id == llm.get_tokenizer().eos_token_id
        if not bitmask[0, token_id // 32] >> (token_id % 32) & 1:
            return False
        state.advance(token_id)
    return True


def one_string(**keywords: Any) -> dict[str, Any]:
    """A schema of an object with one string, ``a``."""
    return {"type": "object", "properties": {"a": {"type": "string", **keywords}}, "required": ["a"]}
