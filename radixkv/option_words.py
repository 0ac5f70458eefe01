"""What an option accepts, and what is wrong with a given one, in words."""

from __future__ import annotations

import difflib
import types
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ValidationError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


def refuse_unknown(caller: str, options: Iterable[str], known: Collection[str]) -> None:
    """Refuse an unknown keyword in the words of Python's own error.

    Args:
        caller: what was called, without parentheses.

    Raises:
        TypeError: naming the first unknown keyword, and the nearest known one if there is one.
    """
    for name in options:
        if name not in known:
            near = nearest(name, known)
            hint = "" if near is None else f". Did you mean {near!r}?"
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}{hint}")


class _Elsewhere(NamedTuple):
    """An option of vLLM's `LLM` that is not ours: values that change nothing here, and what is said of all others.

    Programs set them out of habit, mostly to what is done here in any case, such as ``tensor_parallel_size=1``.
    """

    without_effect: tuple[Any, ...]
    otherwise: str

    def allows(self, value: Any) -> bool:
        """Whether it changes nothing here."""
        # By type too: True is not the number 1.
        return any(type(value) is type(each) and value == each for each in self.without_effect)


_ONE_DEVICE = _Elsewhere((1, None), "an engine runs on one device; radixkv serve --replicas places several engines")
_TEXT = _Elsewhere((None, {}), "models take text only")
_DRAFTS = "speculative_config={'method': 'tree'} drafts from the cache"
_GENERATES = _Elsewhere(("auto", "generate", None), "models generate text; there are no embeddings, scores or classes")
_OWN_FILES = "pass a folder, for example of huggingface_hub.snapshot_download, as the model"

_ELSEWHERE: Mapping[str, _Elsewhere] = types.MappingProxyType(
    {
        "tensor_parallel_size": _ONE_DEVICE,
        "pipeline_parallel_size": _ONE_DEVICE,
        "data_parallel_size": _ONE_DEVICE,
        "distributed_executor_backend": _Elsewhere((None, "uni"), _ONE_DEVICE.otherwise),
        # A permission; no model needs it that can run over blocks.
        "trust_remote_code": _Elsewhere((True, False), "code that comes with a model is never run"),
        "disable_log_stats": _Elsewhere((True,), "outputs have metrics, and radixkv serve has /metrics"),
        "enable_chunked_prefill": _Elsewhere((True, None), "prompts are computed in chunks of max_num_batched_tokens"),
        "enable_lora": _Elsewhere((False,), "merge the adapter into the model (peft's merge_and_unload)"),
        "swap_space": _Elsewhere((0, None), "host_cache_size keeps blocks in host memory"),
        "cpu_offload_gb": _Elsewhere((0,), "weights are on the device; quantization makes them smaller on a CPU"),
        "num_gpu_blocks_override": _Elsewhere((None,), "num_blocks is the number of blocks"),
        "scheduling_policy": _Elsewhere(("fcfs", "priority"), "requests of a lower priority number go first"),
        "generation_config": _Elsewhere(("vllm",), "of a model's generation_config only the end tokens are used"),
        "skip_tokenizer_init": _Elsewhere((False,), "a model without a tokenizer takes token ids"),
        "tokenizer_mode": _Elsewhere(("auto", "hf"), "tokenizer takes any tokenizer of transformers"),
        "load_format": _Elsewhere(("auto", "hf", "safetensors"), "the format is seen by the model's files"),
        "revision": _Elsewhere((None,), _OWN_FILES),
        "tokenizer_revision": _Elsewhere((None,), _OWN_FILES),
        "download_dir": _Elsewhere((None,), "the variable HF_HOME says where files of the hub are kept"),
        "hf_overrides": _Elsewhere((None, {}), "pass a loaded transformers model, which can have any configuration"),
        "compilation_config": _Elsewhere((None,), "enable_torch_compile and enforce_eager say what is compiled"),
        "limit_mm_per_prompt": _TEXT,
        "mm_processor_kwargs": _TEXT,
        "runner": _GENERATES,
        "task": _GENERATES,
        "spec_method": _Elsewhere((None,), _DRAFTS),
        "spec_model": _Elsewhere((None,), _DRAFTS),
        "kv_transfer_config": _Elsewhere((None,), "host_cache_size, disk_cache and shared_cache keep blocks elsewhere"),
        "logprobs_mode": _Elsewhere(("raw_logprobs",), "log-probabilities are the model's own"),
        "logits_processors": _Elsewhere((None, []), "logit_bias, bad_words and structured_outputs belong to requests"),
    }
)


def without_elsewhere(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options but those that are vLLM's alone.

    Raises:
        ValueError: one of those has a value that would have to change something; the message says what there is instead.
    """
    for name, value in options.items():
        elsewhere = _ELSEWHERE.get(name)
        if elsewhere is not None and not elsewhere.allows(value):
            expected = " or ".join(map(repr, elsewhere.without_effect))
            raise ValueError(f"{name}: expected {expected}, got {value!r:.80}: {elsewhere.otherwise}")
    return {name: value for name, value in options.items() if name not in _ELSEWHERE}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is spelled most like ``name``; None: none is near."""
    return next(iter(difflib.get_close_matches(name, list(known), 1)), None)


class Accepted(NamedTuple):
    """What a field accepts.

    Attributes:
        kinds: types, or one Literal; None is not among them.
        optional: whether None is accepted, too.
        low, high: the range of a number; None: no bound.
        above_low: whether ``low`` itself is out of the range.
    """

    kinds: tuple[Any, ...]
    optional: bool
    low: Any
    high: Any
    above_low: bool

    @classmethod
    def of(cls, field: FieldInfo) -> Accepted:
        """What ``field`` accepts."""
        annotation = field.annotation
        kinds = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
        at_least = next((bound.ge for bound in field.metadata if isinstance(bound, Ge)), None)
        above = next((bound.gt for bound in field.metadata if isinstance(bound, Gt)), None)
        return cls(
            kinds=tuple(kind for kind in kinds if kind is not types.NoneType),
            optional=types.NoneType in kinds,
            low=at_least if above is None else above,
            high=next((bound.le for bound in field.metadata if isinstance(bound, Le)), None),
            above_low=above is not None,
        )

    def in_words(self) -> str:
        """Such as "a whole number of at least 1 or None"."""
        return self._kind_in_words() + self._range_in_words() + (" or None" if self.optional else "")

    def _kind_in_words(self) -> str:
        kind = self.kinds[0]
        if get_origin(kind) is Literal:
            return f"one of {', '.join(map(str, get_args(kind)))}"
        if Path in self.kinds:
            return "a path"
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return "a JSON object"
        words = {
            bool: "True or False",
            int: "a whole number",
            float: "a number",
            str: "text",
            datetime: "a date and time",
        }
        return words.get(kind, "a list of texts")

    def _range_in_words(self) -> str:
        if self.low is None:
            return ""
        if self.above_low:
            return f" above {self.low}" + ("" if self.high is None else f" and up to {self.high}")
        return f" of at least {self.low}" if self.high is None else f" from {self.low} to {self.high}"


def in_one_line(error: ValidationError, fields: Mapping[str, FieldInfo]) -> str:
    """The first of the errors that pydantic found, as the rest of the house words it.

    Args:
        error: pydantic's.
        fields: of the configuration, by name.
    """
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":  # of a validator of ours
        return str(first["ctx"]["error"])
    name = str(first["loc"][0])
    # What is not shown in a configuration's text, such as a key, is not shown in errors either.
    got = f"{first['input']!r:.80}" if fields[name].repr else f"something else ({type(first['input']).__name__})"
    return f"{name}: expected {Accepted.of(fields[name]).in_words()}, got {got}"
