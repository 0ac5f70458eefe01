"""RadixKV: prefix caching for language models. Shared blocks are stored once and read once.

The names below load on first use, so that `radixkv.cache` can be imported without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixkv.async_llm import AsyncLLM
    from radixkv.chat import Chat
    from radixkv.llm import LLM
    from radixkv.outputs import BeamSearchOutput, CompletionOutput, RequestOutput
    from radixkv.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams
    from radixkv.scheduling.tenant_share import TenantShare
    from radixkv.tools.definitions import ParsedAnswer, ToolCall

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "Chat",
    "CompletionOutput",
    "ParsedAnswer",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TenantShare",
    "ToolCall",
]


def __getattr__(name: str) -> Any:
    modules = {
        "LLM": "llm",
        "AsyncLLM": "async_llm",
        "Chat": "chat",
        "SamplingParams": "sampling_params",
        "BeamSearchParams": "sampling_params",
        "StructuredOutputsParams": "sampling_params",
        "TenantShare": "scheduling.tenant_share",
        "ParsedAnswer": "tools.definitions",
        "ToolCall": "tools.definitions",
    }
    if name not in __all__:
        raise AttributeError(f"module 'radixkv' has no attribute {name!r}")
    return getattr(importlib.import_module(f"radixkv.{modules.get(name, 'outputs')}"), name)
