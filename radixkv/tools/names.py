"""The names by which options choose the forms of answers."""

from __future__ import annotations

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
]
ReasoningParserName = Literal["auto", "none", "think", "mistral"]
