"""RadixKV: prefix caching for language models. Shared blocks are stored once and read once.

The names below load on first use, so that `radixkv.cache` can be imported without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.lazy_names import lazy_names

if TYPE_CHECKING:
    from radixkv.async_chat import AsyncChat
    from radixkv.async_llm import AsyncLLM
    from radixkv.chat import Chat
    from radixkv.llm import LLM
    from radixkv.outputs import BeamSearchOutput, CompletionOutput, RequestOutput
    from radixkv.prompts import TextPrompt, TokensPrompt
    from radixkv.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams
    from radixkv.scheduling.tenant_share import TenantShare
    from radixkv.tools.definitions import ParsedAnswer, ToolCall

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncChat",
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
    "TextPrompt",
    "TokensPrompt",
    "ToolCall",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "LLM": "llm",
        "AsyncChat": "async_chat",
        "AsyncLLM": "async_llm",
        "BeamSearchOutput": "outputs",
        "BeamSearchParams": "sampling_params",
        "Chat": "chat",
        "CompletionOutput": "outputs",
        "ParsedAnswer": "tools.definitions",
        "RequestOutput": "outputs",
        "SamplingParams": "sampling_params",
        "StructuredOutputsParams": "sampling_params",
        "TenantShare": "scheduling.tenant_share",
        "TextPrompt": "prompts",
        "TokensPrompt": "prompts",
        "ToolCall": "tools.definitions",
    },
)
