"""Options of vLLM that RadixKV does not have: which values change nothing here, and what to use instead of the others.

Programs and command lines set them out of habit, mostly to a value that changes nothing: ``tensor_parallel_size=1``. What has
a meaning here is an option here, with vLLM's name where it has one.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from radixkv.option_words import refuse_unknown

_Callable = TypeVar("_Callable", bound=Callable[..., Any])


class VllmOption(NamedTuple):
    """An option of vLLM's that is not ours.

    Attributes:
        accepted: values that change nothing here. If one of them is a truth value, the option is a flag on vLLM's
            command line; all other options take a value there.
        hint: what the error says of all other values.
    """

    accepted: tuple[Any, ...]
    hint: str

    @property
    def is_flag(self) -> bool:
        """Whether the command line's option has no value."""
        return any(isinstance(value, bool) for value in self.accepted)

    def check(self, name: str, value: Any) -> None:
        """Refuse a value that would have to change something.

        Raises:
            ValueError: says what there is instead.
        """
        if not any(_is_same(value, each) for each in self.accepted):
            expected = " or ".join(map(repr, self.accepted)) or "it not to be there"
            raise ValueError(f"{name}: expected {expected}, got {value!r:.80}: {self.hint}")


def _is_same(value: Any, other: Any) -> bool:
    """Whether both are one value: 1.0 is the number 1, and True is not."""
    kinds = {type(value), type(other)}
    return (len(kinds) == 1 or kinds == {int, float}) and bool(value == other)


_ONE_DEVICE = "an engine runs on one device; radixkv serve --replicas places several engines"
_ONE_ENGINE = "radixkv serve --replicas, or radixkv replica and radixkv ingress, make one server of several engines"
_TEXT = VllmOption((None, {}), "models take text only")
_DRAFTS = "speculative_config={'method': 'tree'} drafts from the cache"
_GENERATES = VllmOption(("auto", "generate", None), "models generate text; there are no embeddings, scores or classes")
_OWN_FILES = "pass a folder, for example of huggingface_hub.snapshot_download, as the model"
_ADAPTERS = "merge the adapter into the model (peft's merge_and_unload)"
_STREAMS = "LLM's calls return whole answers; streams yield what is new"
_GRAMMARS = VllmOption((None,), "structured_outputs of SamplingParams takes StructuredOutputsParams")
_CONTENT_FORMAT = VllmOption(("auto",), "the chat template is tried, and given what it takes")
_PROCESSORS = VllmOption((None, []), "logit_bias, bad_words and structured_outputs belong to requests")
_TIERS = "host_cache_size, disk_cache and shared_cache keep blocks elsewhere"
_NO_WATERMARK = VllmOption((None, False), "answers have no watermark")
_LIKELIEST = VllmOption((None,), "logprobs and prompt_logprobs say how many of the likeliest tokens are reported")
_EVERY_TOKEN = "streams have every token as soon as it is there"

# Options of vLLM's `LLM` and of its command line.
ENGINE: Mapping[str, VllmOption] = types.MappingProxyType(
    {
        "tensor_parallel_size": VllmOption((1, None), _ONE_DEVICE),
        "pipeline_parallel_size": VllmOption((1, None), _ONE_DEVICE),
        "data_parallel_size": VllmOption((1, None), _ONE_DEVICE),
        "enable_expert_parallel": VllmOption((False,), _ONE_DEVICE),
        "distributed_executor_backend": VllmOption((None, "uni"), _ONE_DEVICE),
        "disable_custom_all_reduce": VllmOption((True, False), _ONE_DEVICE),
        # A permission that no model which can run over blocks needs.
        "trust_remote_code": VllmOption((True, False), "code that comes with a model is never run"),
        "disable_log_stats": VllmOption((True, False), "outputs have metrics, and radixkv serve has /metrics"),
        "enable_chunked_prefill": VllmOption((True, None), "prompts are computed in chunks of max_num_batched_tokens"),
        "enable_lora": VllmOption((False, None), _ADAPTERS),
        "max_loras": VllmOption((None, 1), _ADAPTERS),
        "max_lora_rank": VllmOption((None, 16), _ADAPTERS),
        "swap_space": VllmOption((0, None, 4), "host_cache_size keeps blocks in host memory"),
        "cpu_offload_gb": VllmOption((0,), "weights are on the device; quantization makes them smaller on a CPU"),
        "num_gpu_blocks_override": VllmOption((None,), "num_blocks is the number of blocks"),
        "scheduling_policy": VllmOption(("fcfs", "priority"), "requests of a lower priority number go first"),
        "stream_interval": VllmOption((1,), _EVERY_TOKEN),
        "skip_tokenizer_init": VllmOption((False,), "a model without a tokenizer takes token ids"),
        "tokenizer_mode": VllmOption(("auto", "hf"), "tokenizer takes any tokenizer of transformers"),
        "load_format": VllmOption(("auto", "hf", "safetensors"), "the format is seen by the model's files"),
        "config_format": VllmOption(("auto", "hf"), "models have a config.json, or are GGUF files"),
        "model_impl": VllmOption(("auto", "transformers"), "models are those of transformers"),
        "revision": VllmOption((None, "main"), _OWN_FILES),
        "code_revision": VllmOption((None, "main"), _OWN_FILES),
        "tokenizer_revision": VllmOption((None, "main"), _OWN_FILES),
        "download_dir": VllmOption((None,), "the variable HF_HOME says where files of the hub are kept"),
        "hf_token": VllmOption((None,), "the variable HF_TOKEN holds the key of the hub"),
        "hf_overrides": VllmOption((None, {}), "pass a loaded transformers model, which can have any configuration"),
        "compilation_config": VllmOption((None,), "enable_torch_compile and enforce_eager say what is compiled"),
        "max_seq_len_to_capture": VllmOption((8192, None), "enforce_eager says whether there are CUDA graphs"),
        "disable_async_output_proc": VllmOption((False,), "async_scheduling says whether steps overlap"),
        "preemption_mode": VllmOption((None, "recompute"), "what is no longer cached is recomputed"),
        "worker_cls": VllmOption(("auto",), _ONE_DEVICE),
        "use_tqdm_on_load": VllmOption((True, False), "an LLM loads without a progress bar"),
        "disable_sliding_window": VllmOption((False,), "layers have the windows that the model's configuration says"),
        "calculate_kv_scales": VllmOption((False,), "kv_cache_dtype says how keys and values are kept"),
        "max_num_partial_prefills": VllmOption((1,), "max_num_batched_tokens bounds the prompts of a step"),
        "structured_outputs_config": VllmOption((None,), "grammars are enforced in one way, after the thinking"),
        "enable_sleep_mode": VllmOption((False,), "blocks and weights stay where they are"),
        "limit_mm_per_prompt": _TEXT,
        "mm_processor_kwargs": _TEXT,
        "allowed_local_media_path": VllmOption(("",), _TEXT.hint),
        "allowed_media_domains": VllmOption((None,), _TEXT.hint),
        "enable_prompt_embeds": VllmOption((False,), _TEXT.hint),
        "pooler_config": VllmOption((None,), _GENERATES.hint),
        "runner": _GENERATES,
        "task": _GENERATES,
        "convert": VllmOption(("auto", "none"), _GENERATES.hint),
        "spec_method": VllmOption((None,), _DRAFTS),
        "spec_model": VllmOption((None,), _DRAFTS),
        "kv_transfer_config": VllmOption((None,), _TIERS),
        "kv_offloading_size": VllmOption((None,), _TIERS),
        "kv_events_config": VllmOption((None,), "kv_events_endpoint publishes them"),
        # Hashes of all these kinds stand for the tokens, which are themselves compared here.
        "prefix_caching_hash_algo": VllmOption(
            ("builtin", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"), "prefixes are compared token by token"
        ),
        "max_logprobs": VllmOption((20,), "requests over HTTP get 20 at most, calls any number"),
        "logprobs_mode": VllmOption(("raw_logprobs",), "log-probabilities are the model's own"),
        "logits_processors": _PROCESSORS,
        "guided_decoding_backend": VllmOption(("auto", "guidance"), "grammars are enforced in one way"),
        "enable_log_requests": VllmOption(
            (False,), "access_log of radixkv serve writes a line for each, without its text"
        ),
    }
)
# Options of its `LLM` that are options of the server here.
LIBRARY: Mapping[str, VllmOption] = types.MappingProxyType(
    {**ENGINE, "served_model_name": VllmOption((None,), "radixkv serve has it; the LLM has no name")}
)
# Options of its command line, ``vllm serve``, alone.
SERVER: Mapping[str, VllmOption] = types.MappingProxyType(
    {
        "tokenizer": VllmOption(
            (), "a tokenizer is part of the model's folder; in Python, LLM(tokenizer=...) takes any"
        ),
        # The client says by tool_choice whether the model may call tools.
        "enable_auto_tool_choice": VllmOption((True, False), "tool_choice of a request says whether tools are called"),
        "tool_parser_plugin": VllmOption((), "tool_call_parser is one of those that are there"),
        "reasoning_parser_plugin": VllmOption((), "reasoning_parser is one of those that are there"),
        "chat_template_content_format": _CONTENT_FORMAT,
        "trust_request_chat_template": VllmOption((False,), "chat_template belongs to the server"),
        "response_role": VllmOption(("assistant",), "answers are the assistant's"),
        "return_tokens_as_token_ids": VllmOption((False,), "return_token_ids of a request adds token ids"),
        "lora_modules": VllmOption((), _ADAPTERS),
        "api_server_count": VllmOption((1,), _ONE_ENGINE),
        "headless": VllmOption((False,), _ONE_ENGINE),
        "nnodes": VllmOption((1,), _ONE_ENGINE),
        "disable_frontend_multiprocessing": VllmOption((True, False), "the server and its engine are one process"),
        "enable_server_load_tracking": VllmOption((True, False), "/load is always there"),
        "enable_prompt_tokens_details": VllmOption((True, False), "usage always has them"),
        "enable_request_id_headers": VllmOption((True, False), "answers always have X-Request-Id"),
        "enable_tokenizer_info_endpoint": VllmOption((True, False), "/tokenizer_info is always there"),
        "enable_force_include_usage": VllmOption((False,), "stream_options.include_usage of a request adds it"),
        "disable_fastapi_docs": VllmOption((False,), "there are no such pages; /openapi.json is always there"),
        "disable_log_requests": VllmOption((True,), "access_log writes a line for each, without its text"),
        "enable_log_outputs": VllmOption((False,), "access_log writes a line for each request, without its text"),
        "max_log_len": VllmOption((), "the log has no prompts"),
        "disable_uvicorn_access_log": VllmOption((True,), "access_log writes a line for each request"),
        "uvicorn_log_level": VllmOption(("info",), "the log is written at level INFO"),
        "shutdown_timeout": VllmOption((), "grace_seconds is how long running requests have"),
        "max_num_queued_reqs": VllmOption((), "max_queue is how many may wait"),
        "root_path": VllmOption(("", "/"), "paths begin at /; a proxy in front takes its prefix away"),
        "middleware": VllmOption((), "radixkv.server has no place for it; a proxy in front does"),
        "allowed_methods": VllmOption((["*"],), "cors_origins may use all that there are"),
        "allowed_headers": VllmOption((["*"],), "cors_origins may send all that are used"),
        "allow_credentials": VllmOption((False,), "there are no cookies; pages send a key as a header"),
        "ssl_cert_reqs": VllmOption((0,), "with ssl_ca_certs, clients must have a certificate"),
        "enable_ssl_refresh": VllmOption((False,), "certificates are read at the start"),
    }
)


# Arguments of the methods of vLLM's `LLM` and `AsyncLLM` that generate.
CALLS: Mapping[str, VllmOption] = types.MappingProxyType(
    {
        "lora_request": VllmOption((None,), _ADAPTERS),
        "prompt_adapter_request": VllmOption((None,), _ADAPTERS),
        "prompt_token_ids": VllmOption((None,), "prompts may be lists of token ids"),
        "prompt_text": VllmOption((None,), "a prompt may be a dictionary with its text and its token ids"),
        "tokenization_kwargs": VllmOption((None, {}), "prompts may be token ids, made in any way"),
        "guided_options_request": _GRAMMARS,
        "mm_processor_kwargs": _TEXT,
        "chat_template_content_format": _CONTENT_FORMAT,
        "concurrency_limit": VllmOption((None,), "max_num_seqs of LLM is how many sequences run side by side"),
        "trace_headers": VllmOption((None,), "radixkv serve takes them from requests over HTTP"),
        "data_parallel_rank": VllmOption((None,), _ONE_ENGINE),
    }
)
# Fields of vLLM's `SamplingParams`.
SAMPLING: Mapping[str, VllmOption] = types.MappingProxyType(
    {
        "output_kind": VllmOption((), _STREAMS),
        "extra_args": VllmOption((None, {}), "nothing reads them"),
        "truncate_prompt_tokens": VllmOption((None,), "prompts may be token ids, cut to any length"),
        "flat_logprobs": VllmOption((False,), "log-probabilities are a dictionary for each token"),
        "spaces_between_special_tokens": VllmOption((True,), "texts are what the tokenizer decodes"),
        "logits_processors": _PROCESSORS,
        "guided_decoding": _GRAMMARS,
        "use_beam_search": VllmOption((False,), "LLM.beam_search takes BeamSearchParams"),
        "skip_reading_prefix_cache": VllmOption((None, False), "a prompt with cache={'read': False} reuses nothing"),
        "thinking_token_budget": VllmOption((None,), "max_tokens bounds thoughts and answer together"),
        "watermarking": _NO_WATERMARK,
        "repetition_detection": VllmOption((None,), "repetition_penalty and frequency_penalty avoid repetitions"),
        "logprob_token_ids": _LIKELIEST,
        "prompt_logprob_token_ids": _LIKELIEST,
        "prompt_logprob_start": VllmOption((None, 0), "prompt_logprobs are those of the whole prompt"),
        "routed_experts_prompt_start": VllmOption((0,), "outputs do not say which experts tokens had"),
        "stream_interval": VllmOption((None, 1), _EVERY_TOKEN),
        "trace_decode_token_ids": VllmOption((None,), "a prompt's prompt_logprobs score given tokens"),
        # Every request has a copy of its own.
        "skip_clone": VllmOption((True, False), "parameters may be changed between calls"),
    }
)
# Fields of vLLM's `StructuredOutputsParams`.
STRUCTURED_OUTPUTS: Mapping[str, VllmOption] = types.MappingProxyType(
    {
        "disable_fallback": VllmOption((True, False), "grammars are enforced in one way"),
        "disable_any_whitespace": VllmOption((False,), "JSON has at most one space between its parts"),
        "disable_additional_properties": VllmOption((False,), "additionalProperties is a part of the schema"),
        "whitespace_pattern": VllmOption((None,), "JSON has at most one space between its parts"),
    }
)
# Fields of vLLM's `BeamSearchParams`.
BEAM_SEARCH: Mapping[str, VllmOption] = types.MappingProxyType(
    {
        # Beams have all of their tokens, those that ended them, too; vLLM's default is not refused for being written out.
        "include_stop_str_in_output": VllmOption((False, True), "beams have what ended them, end tokens too"),
        "skip_special_tokens": VllmOption((True, False), "beams have all of their tokens"),
        "watermarking": _NO_WATERMARK,
    }
)


def without_vllm_options(
    options: Mapping[str, Any], vllm_options: Mapping[str, VllmOption] = LIBRARY
) -> dict[str, Any]:
    """The options of a call without those that only vLLM has.

    Raises:
        ValueError: one of those has a value that would have to change something; the message says what there is instead.
    """
    for name, value in options.items():
        if name in vllm_options:
            vllm_options[name].check(name, value)
    return {name: value for name, value in options.items() if name not in vllm_options}


def takes_vllm_options(vllm_options: Mapping[str, VllmOption]) -> Callable[[_Callable], _Callable]:
    """Let a function, or the constructor of a class, also take vLLM's options with values that change nothing.

    Type checkers see only the function's own parameters. The function then raises, before it begins:

    Raises:
        TypeError: a keyword is unknown; the message names the nearest known one.
        ValueError: one of vLLM's has another value; the message says what there is instead.
    """

    def decorate(function: _Callable) -> _Callable:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]
            return function
        known = inspect.signature(function).parameters

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            own = without_vllm_options(options, vllm_options)
            refuse_unknown(function.__qualname__, own, known)
            return function(*arguments, **own)

        checked: Any = call
        return checked  # type: ignore[no-any-return]

    return decorate
