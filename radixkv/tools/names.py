"""The names by which options choose the forms of answers."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Literal

ToolCallParserName = Literal[
    "auto",
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "mistral",
    "mistral_v11",
    "deepseek_v3",
    "deepseek_v31",
    "harmony",
    "json",
    "openai",
]
ReasoningParserName = Literal["auto", "none", "think", "mistral", "deepseek_r1", "qwen3"]
# vLLM's names that are those of models, and what they stand for here.
SAME_AS: Mapping[str, str] = types.MappingProxyType({"openai": "harmony", "deepseek_r1": "think", "qwen3": "think"})
