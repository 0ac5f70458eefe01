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


class Elsewhere(NamedTuple):
    """An option of vLLM's that is not ours.

    Attributes:
        without_effect: values that change nothing here. If one of them is a truth value, the option is a flag on vLLM's
            command line; all other options take a value there.
        otherwise: what the error says of all other values.
    """

    without_effect: tuple[Any, ...]
    otherwise: str

    @property
    def is_flag(self) -> bool:
        """Whether the command line's option has no value."""
        return any(isinstance(value, bool) for value in self.without_effect)

    def check(self, name: str, value: Any) -> None:
        """Refuse a value that would have to change something.

        Raises:
            ValueError: says what there is instead.
        """
        if not any(_is_same(value, each) for each in self.without_effect):
            expected = " or ".join(map(repr, self.without_effect)) or "it not to be there"
            raise ValueError(f"{name}: expected {expected}, got {value!r:.80}: {self.otherwise}")


def _is_same(value: Any, other: Any) -> bool:
    """Whether both are one value: 1.0 is the number 1, and True is not."""
    kinds = {type(value), type(other)}
    return (len(kinds) == 1 or kinds == {int, float}) and bool(value == other)


_ONE_DEVICE = "an engine runs on one device; radixkv serve --replicas places several engines"
_ONE_ENGINE = "radixkv serve --replicas, or radixkv replica and radixkv ingress, make one server of several engines"
_TEXT = Elsewhere((None, {}), "models take text only")
_DRAFTS = "speculative_config={'method': 'tree'} drafts from the cache"
_GENERATES = Elsewhere(("auto", "generate", None), "models generate text; there are no embeddings, scores or classes")
_OWN_FILES = "pass a folder, for example of huggingface_hub.snapshot_download, as the model"
_ADAPTERS = "merge the adapter into the model (peft's merge_and_unload)"
_STREAMS = "LLM's calls return whole answers; streams yield what is new"
_GRAMMARS = Elsewhere((None,), "structured_outputs of SamplingParams takes StructuredOutputsParams")
_CONTENT_FORMAT = Elsewhere(("auto",), "the chat template is tried, and given what it takes")
_PROCESSORS = Elsewhere((None, []), "logit_bias, bad_words and structured_outputs belong to requests")
_TIERS = "host_cache_size, disk_cache and shared_cache keep blocks elsewhere"

# Options of vLLM's `LLM` and of its command line.
ENGINE: Mapping[str, Elsewhere] = types.MappingProxyType(
    {
        "tensor_parallel_size": Elsewhere((1, None), _ONE_DEVICE),
        "pipeline_parallel_size": Elsewhere((1, None), _ONE_DEVICE),
        "data_parallel_size": Elsewhere((1, None), _ONE_DEVICE),
        "enable_expert_parallel": Elsewhere((False,), _ONE_DEVICE),
        "distributed_executor_backend": Elsewhere((None, "uni"), _ONE_DEVICE),
        "disable_custom_all_reduce": Elsewhere((True, False), _ONE_DEVICE),
        # A permission that no model which can run over blocks needs.
        "trust_remote_code": Elsewhere((True, False), "code that comes with a model is never run"),
        "disable_log_stats": Elsewhere((True,), "outputs have metrics, and radixkv serve has /metrics"),
        "enable_chunked_prefill": Elsewhere((True, None), "prompts are computed in chunks of max_num_batched_tokens"),
        "enable_lora": Elsewhere((False, None), _ADAPTERS),
        "max_loras": Elsewhere((None,), _ADAPTERS),
        "max_lora_rank": Elsewhere((None,), _ADAPTERS),
        "swap_space": Elsewhere((0, None), "host_cache_size keeps blocks in host memory"),
        "cpu_offload_gb": Elsewhere((0,), "weights are on the device; quantization makes them smaller on a CPU"),
        "num_gpu_blocks_override": Elsewhere((None,), "num_blocks is the number of blocks"),
        "scheduling_policy": Elsewhere(("fcfs", "priority"), "requests of a lower priority number go first"),
        "stream_interval": Elsewhere((1,), "streams have every token as soon as it is there"),
        "skip_tokenizer_init": Elsewhere((False,), "a model without a tokenizer takes token ids"),
        "tokenizer_mode": Elsewhere(("auto", "hf"), "tokenizer takes any tokenizer of transformers"),
        "load_format": Elsewhere(("auto", "hf", "safetensors"), "the format is seen by the model's files"),
        "config_format": Elsewhere(("auto", "hf"), "models have a config.json, or are GGUF files"),
        "model_impl": Elsewhere(("auto", "transformers"), "models are those of transformers"),
        "revision": Elsewhere((None, "main"), _OWN_FILES),
        "code_revision": Elsewhere((None, "main"), _OWN_FILES),
        "tokenizer_revision": Elsewhere((None, "main"), _OWN_FILES),
        "download_dir": Elsewhere((None,), "the variable HF_HOME says where files of the hub are kept"),
        "hf_token": Elsewhere((None,), "the variable HF_TOKEN holds the key of the hub"),
        "hf_overrides": Elsewhere((None, {}), "pass a loaded transformers model, which can have any configuration"),
        "compilation_config": Elsewhere((None,), "enable_torch_compile and enforce_eager say what is compiled"),
        "max_seq_len_to_capture": Elsewhere((8192, None), "enforce_eager says whether there are CUDA graphs"),
        "disable_async_output_proc": Elsewhere((False,), "async_scheduling says whether steps overlap"),
        "preemption_mode": Elsewhere((None, "recompute"), "what is no longer cached is recomputed"),
        "enable_sleep_mode": Elsewhere((False,), "blocks and weights stay where they are"),
        "limit_mm_per_prompt": _TEXT,
        "mm_processor_kwargs": _TEXT,
        "allowed_local_media_path": Elsewhere(("",), _TEXT.otherwise),
        "pooler_config": Elsewhere((None,), _GENERATES.otherwise),
        "runner": _GENERATES,
        "task": _GENERATES,
        "convert": Elsewhere(("auto", "none"), _GENERATES.otherwise),
        "spec_method": Elsewhere((None,), _DRAFTS),
        "spec_model": Elsewhere((None,), _DRAFTS),
        "kv_transfer_config": Elsewhere((None,), _TIERS),
        "kv_offloading_size": Elsewhere((None,), _TIERS),
        "kv_events_config": Elsewhere((None,), "kv_events_endpoint publishes them"),
        # Hashes of all these kinds stand for the tokens, which are themselves compared here.
        "prefix_caching_hash_algo": Elsewhere(
            ("builtin", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"), "prefixes are compared token by token"
        ),
        "max_logprobs": Elsewhere((20,), "requests over HTTP get 20 at most, calls any number"),
        "logprobs_mode": Elsewhere(("raw_logprobs",), "log-probabilities are the model's own"),
        "logits_processors": _PROCESSORS,
        "guided_decoding_backend": Elsewhere(("auto", "guidance"), "grammars are enforced in one way"),
        "enable_log_requests": Elsewhere(
            (False,), "access_log of radixkv serve writes a line for each, without its text"
        ),
    }
)
# Options of its command line, ``vllm serve``, alone.
SERVER: Mapping[str, Elsewhere] = types.MappingProxyType(
    {
        "tokenizer": Elsewhere(
            (), "a tokenizer is part of the model's folder; in Python, LLM(tokenizer=...) takes any"
        ),
        # The client says by tool_choice whether the model may call tools.
        "enable_auto_tool_choice": Elsewhere((True, False), "tool_choice of a request says whether tools are called"),
        "tool_parser_plugin": Elsewhere((), "tool_call_parser is one of those that are there"),
        "reasoning_parser_plugin": Elsewhere((), "reasoning_parser is one of those that are there"),
        "chat_template_content_format": _CONTENT_FORMAT,
        "trust_request_chat_template": Elsewhere((False,), "chat_template belongs to the server"),
        "response_role": Elsewhere(("assistant",), "answers are the assistant's"),
        "return_tokens_as_token_ids": Elsewhere((False,), "return_token_ids of a request adds token ids"),
        "lora_modules": Elsewhere((), _ADAPTERS),
        "structured_outputs_config": Elsewhere((), "grammars are enforced in one way, after the thinking"),
        "api_server_count": Elsewhere((1,), _ONE_ENGINE),
        "headless": Elsewhere((False,), _ONE_ENGINE),
        "nnodes": Elsewhere((1,), _ONE_ENGINE),
        "disable_frontend_multiprocessing": Elsewhere((True, False), "the server and its engine are one process"),
        "enable_server_load_tracking": Elsewhere((True, False), "/load is always there"),
        "enable_prompt_tokens_details": Elsewhere((True, False), "usage always has them"),
        "enable_request_id_headers": Elsewhere((True, False), "answers always have X-Request-Id"),
        "enable_tokenizer_info_endpoint": Elsewhere((True, False), "/tokenizer_info is always there"),
        "enable_force_include_usage": Elsewhere((False,), "stream_options.include_usage of a request adds it"),
        "disable_fastapi_docs": Elsewhere((False,), "there are no such pages; /openapi.json is always there"),
        "disable_log_requests": Elsewhere((True,), "access_log writes a line for each, without its text"),
        "enable_log_outputs": Elsewhere((False,), "access_log writes a line for each request, without its text"),
        "max_log_len": Elsewhere((), "the log has no prompts"),
        "disable_uvicorn_access_log": Elsewhere((True,), "access_log writes a line for each request"),
        "uvicorn_log_level": Elsewhere(("info",), "the log is written at level INFO"),
        "shutdown_timeout": Elsewhere((), "grace_seconds is how long running requests have"),
        "max_num_queued_reqs": Elsewhere((), "max_queue is how many may wait"),
        "root_path": Elsewhere(("", "/"), "paths begin at /; a proxy in front takes its prefix away"),
        "middleware": Elsewhere((), "radixkv.server has no place for it; a proxy in front does"),
        "allowed_methods": Elsewhere((["*"],), "cors_origins may use all that there are"),
        "allowed_headers": Elsewhere((["*"],), "cors_origins may send all that are used"),
        "allow_credentials": Elsewhere((False,), "there are no cookies; pages send a key as a header"),
        "ssl_cert_reqs": Elsewhere((0,), "with ssl_ca_certs, clients must have a certificate"),
        "enable_ssl_refresh": Elsewhere((False,), "certificates are read at the start"),
    }
)


# Arguments of the methods of vLLM's `LLM` and `AsyncLLM` that generate.
CALLS: Mapping[str, Elsewhere] = types.MappingProxyType(
    {
        "lora_request": Elsewhere((None,), _ADAPTERS),
        "prompt_adapter_request": Elsewhere((None,), _ADAPTERS),
        "prompt_token_ids": Elsewhere((None,), "prompts may be lists of token ids"),
        "prompt_text": Elsewhere((None,), "a prompt may be a dictionary with its text and its token ids"),
        "tokenization_kwargs": Elsewhere((None, {}), "prompts may be token ids, made in any way"),
        "guided_options_request": _GRAMMARS,
        "mm_processor_kwargs": _TEXT,
        "chat_template_content_format": _CONTENT_FORMAT,
        "concurrency_limit": Elsewhere((None,), "max_num_seqs of LLM is how many sequences run side by side"),
        "trace_headers": Elsewhere((None,), "radixkv serve takes them from requests over HTTP"),
        "data_parallel_rank": Elsewhere((None,), _ONE_ENGINE),
    }
)
# Fields of vLLM's `SamplingParams`.
SAMPLING: Mapping[str, Elsewhere] = types.MappingProxyType(
    {
        "output_kind": Elsewhere((), _STREAMS),
        "extra_args": Elsewhere((None, {}), "nothing reads them"),
        "truncate_prompt_tokens": Elsewhere((None,), "prompts may be token ids, cut to any length"),
        "flat_logprobs": Elsewhere((False,), "log-probabilities are a dictionary for each token"),
        "spaces_between_special_tokens": Elsewhere((True,), "texts are what the tokenizer decodes"),
        "logits_processors": _PROCESSORS,
        "guided_decoding": _GRAMMARS,
        "best_of": Elsewhere((None,), "n is the number of answers; LLM.beam_search finds the likeliest"),
        "use_beam_search": Elsewhere((False,), "LLM.beam_search takes BeamSearchParams"),
        "skip_reading_prefix_cache": Elsewhere((None, False), "a prompt with cache={'read': False} reuses nothing"),
        "thinking_token_budget": Elsewhere((None,), "max_tokens bounds thoughts and answer together"),
        # Every request has a copy of its own.
        "skip_clone": Elsewhere((True, False), "parameters may be changed between calls"),
    }
)
# Fields of vLLM's `StructuredOutputsParams`.
STRUCTURED_OUTPUTS: Mapping[str, Elsewhere] = types.MappingProxyType(
    {
        "disable_fallback": Elsewhere((True, False), "grammars are enforced in one way"),
        "disable_any_whitespace": Elsewhere((False,), "JSON has at most one space between its parts"),
        "disable_additional_properties": Elsewhere((False,), "additionalProperties is a part of the schema"),
        "whitespace_pattern": Elsewhere((None,), "JSON has at most one space between its parts"),
    }
)
# Fields of vLLM's `BeamSearchParams`.
BEAM_SEARCH: Mapping[str, Elsewhere] = types.MappingProxyType(
    {"include_stop_str_in_output": Elsewhere((True,), "beams have what ended them, end tokens too")}
)


def without_elsewhere(options: Mapping[str, Any], elsewhere: Mapping[str, Elsewhere] = ENGINE) -> dict[str, Any]:
    """The options of a call without those that only vLLM has.

    Raises:
        ValueError: one of those has a value that would have to change something; the message says what there is instead.
    """
    for name, value in options.items():
        if name in elsewhere:
            elsewhere[name].check(name, value)
    return {name: value for name, value in options.items() if name not in elsewhere}


def takes_vllm_options(elsewhere: Mapping[str, Elsewhere]) -> Callable[[_Callable], _Callable]:
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
            own = without_elsewhere(options, elsewhere)
            refuse_unknown(function.__qualname__, own, known)
            return function(*arguments, **own)

        checked: Any = call
        return checked  # type: ignore[no-any-return]

    return decorate
