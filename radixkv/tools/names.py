"""The names by which options choose the forms of answers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

ToolCallParserName = Literal[
    "auto",
    "hermes",
    "qwen3_coder",
    "glm",
    "llama3_json",
    "mistral_v3",
    "mistral_v11",
    "deepseek_v3",
    "deepseek_v31",
    "harmony",
    "lfm2",
    "olmo3",
    "json",
]
ReasoningParserName = Literal["auto", "none", "think", "mistral"]

# vLLM's and SGLang's names of parsers that are named otherwise here. Of models whose chat template shows the form: "auto".
_TOOL_CALL_PARSERS_ELSEWHERE: Mapping[str, ToolCallParserName] = MappingProxyType(
    {
        **dict.fromkeys(("granite4", "qwen", "qwen25"), "hermes"),
        **dict.fromkeys(("qwen3_xml", "step3p5"), "qwen3_coder"),
        **dict.fromkeys(("glm45", "glm47", "ling3", "poolside_v1", "spark25"), "glm"),
        **dict.fromkeys(("llama3", "llama4_json"), "llama3_json"),
        "deepseekv3": "deepseek_v3",
        "deepseekv31": "deepseek_v31",
        **dict.fromkeys(("gpt-oss", "openai"), "harmony"),
        **dict.fromkeys(
            (
                "apertus",
                "apertus2509",
                "cohere_command3",
                "cohere_command4",
                "deepseek_v32",
                "deepseek_v4",
                "deepseekv32",
                "deepseekv4",
                "gemma4",
                "hy_v3",
                "kimi_k2",
                "mimo",
                "minimax",
                "minimax-m2",
                "minimax-m3",
                "minimax_m2",
                "minimax_m3",
                "mistral",
                "phi4_mini_json",
                "seed_oss",
                "solar_open2",
            ),
            "auto",
        ),
    }
)
_REASONING_PARSERS_ELSEWHERE: Mapping[str, ReasoningParserName] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "deepseek-r1",
                "deepseek-v3",
                "deepseek_r1",
                "deepseek_v3",
                "deepseek-v4",
                "deepseek_v4",
                "glm45",
                "glm47",
                "holo2",
                "kimi_k2",
                "mimo",
                "minimax",
                "minimax_m2",
                "nemotron_3",
                "nemotron_v3",
                "olmo3",
                "poolside_v1",
                "qwen3",
                "qwen3-thinking",
                "step3",
                "step3p5",
            ),
            "think",
        ),
        **dict.fromkeys(
            (
                "cohere_command3",
                "cohere_command4",
                "gemma4",
                "gpt-oss",
                "hy_v3",
                "minimax_m3",
                "openai_gptoss",
                "seed_oss",
                "solar_open2",
            ),
            "auto",
        ),
    }
)
# By the name of the option.
PARSERS_ELSEWHERE: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"tool_call_parser": _TOOL_CALL_PARSERS_ELSEWHERE, "reasoning_parser": _REASONING_PARSERS_ELSEWHERE}
)
