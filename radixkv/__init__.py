"""RadixKV: prefix caching for language models. Shared blocks are stored once and read once.

::

    llm.py, async_llm.py    a model for programs; chat.py, async_chat.py: conversations with it
      config.py             every option; llm_options.py: those that both take; vllm_options.py: those that only vLLM has
      prompts/, sampling_params.py, sampling_defaults.py, outputs.py      what goes in, and what comes out; errors.py
      tools/                what an answer holds besides text
    cli/                    the command line
    server/                 the HTTP server; cluster/, ray/: several engines behind one; routing/: which of them answers
    serving/                one engine for many callers
      engine/               the step loop
        scheduling/         what a step computes; drafting/: guesses that it verifies
        sampling/           from logits to tokens and text
        model/              the forward pass: attention/ over the blocks
        memory/             the bytes of the pool's blocks; tiers/: blocks outside it
        cache/              token ids and block ids: which blocks are shared, and which evicted
    observe/                seeing into the cache
    testing/, bench/        property tests of caches, measurements
    lazy_names.py, extras.py                                              imports that wait, packages that may be missing
    namespaces.py           how a tenant's namespaces are named
    threads.py, process_bound.py                                          threads, and what no other process may have
    option_words.py, sizes.py, text_files.py                              what options say, and files that users write

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
    from radixkv.tools.pieces import ParsedAnswer, ToolCall

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
        "ParsedAnswer": "tools.pieces",
        "RequestOutput": "outputs",
        "SamplingParams": "sampling_params",
        "StructuredOutputsParams": "sampling_params",
        "TenantShare": "scheduling.tenant_share",
        "TextPrompt": "prompts",
        "TokensPrompt": "prompts",
        "ToolCall": "tools.pieces",
    },
)
