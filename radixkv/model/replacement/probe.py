"""What a model's modules do, observed while it computes a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from radixkv.errors import UnsupportedModelError
from radixkv.model.attention_function import OPTIONS, attention_by, unsupported_reason
from radixkv.model.layer_probe import diagonal_attention, zero_attention
from radixkv.model.model_errors import errors_of_model, name_of
from radixkv.model.positions.window_mask import window_of
from radixkv.model.replacement.replace_modules import is_unchanged

# How large the random tokens are, in turn, by which modules are compared with what stands in for them; a model computes one
# token for each. In the small ones a norm's epsilon shows, in the large ones that something is clipped.
TOKEN_SIZES = (1e-3, 0.1, 1.0, 4.0, 16.0)


@dataclass(slots=True)
class Probe:
    """What a model's modules were observed to do within `probe_attention`.

    Attributes:
        options: those of `OPTIONS` that each layer, by its index, gives its attention function; not of layers that give it
            more, see `unsupported_reason`.
        attended: the queries, and the keys, of each call of the attention function, ``[1, heads, tokens, dim]``.
        calls: the arguments that each module was last called with, see `record_calls`.
    """

    options: dict[int, dict[str, Any]] = field(default_factory=dict)
    attended: list[torch.Tensor] = field(default_factory=list)
    calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)


@contextmanager
def probe_attention(model: transformers.PreTrainedModel) -> Iterator[Probe]:
    """Within, each token attends to itself alone: real attention could hide how a few tokens were rotated.

    Where a layer has an `unsupported_reason`, it gives zeros: `watch_layers` will refuse the model.
    """
    found = Probe()

    def probe(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **given: Any,
    ) -> torch.Tensor:
        found.attended.extend((query, key))
        if unsupported_reason(module, query, key, attention_mask, given) is not None:
            return zero_attention(query, value)
        layer_idx: Any = module.layer_idx
        given["sliding_window"] = window_of(given.get("sliding_window"), attention_mask)
        found.options[layer_idx] = {name: given[name] for name in OPTIONS if given.get(name) is not None}
        return diagonal_attention(query, key, value)

    with attention_by(model, probe):
        yield found


@contextmanager
def watch_calls(
    modules: Iterable[nn.Module], note: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
) -> Iterator[None]:
    """Within, ``note`` is called before each call of one of these modules, with the module and its arguments."""
    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
        yield


def record_calls(model: transformers.PreTrainedModel, probe: Probe) -> None:
    """Let a model compute a few tokens, and record the calls of those modules whose methods were not changed."""

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        probe.calls[module] = args, kwargs

    with watch_calls([module for module in model.modules() if is_unchanged(module)], record):
        compute_a_few_tokens(model)


def compute_a_few_tokens(model: transformers.PreTrainedModel) -> None:
    """Let a model compute tokens whose positions are as far apart as they can be.

    Raises:
        UnsupportedModelError: its own code fails, or computes with tensors of a class of their own.
    """
    count = len(TOKEN_SIZES)
    tokens = torch.arange(1, count + 1, device=model.device).unsqueeze(0)
    # So far apart, rotation makes a difference; and some models scale queries at far positions only.
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**12
    with errors_of_model(model):
        output = model(input_ids=tokens, position_ids=tokens * ((longest - 1) // count), use_cache=False)
        if is_traceable_wrapper_subclass(output.logits):
            # Native code and kernels would be given an address that such a tensor does not have.
            raise UnsupportedModelError(
                f"{name_of(model)}: expected weights that give tensors of torch's own class, got a "
                f"{type(output.logits).__name__}"
            )
