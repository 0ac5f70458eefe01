"""The names by which options choose the forms of answers."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Literal

ToolCallParserName = Literal[
    "auto",
    "hermes",
    "qwen3_coder",
    "glm",
    "llama3_json",
    "mistral",
    "mistral_v11",
    "deepseek_v3",
    "deepseek_v31",
    "harmony",
    "json",
    "openai",
    "glm45",
    "glm47",
]
ReasoningParserName = Literal["auto", "none", "think", "mistral", "deepseek_r1", "qwen3"]
# vLLM's names that are those of models, and what they stand for here.
SAME_AS: Mapping[str, str] = types.MappingProxyType(
    {"openai": "harmony", "glm45": "glm", "glm47": "glm", "deepseek_r1": "think", "qwen3": "think"}
)
