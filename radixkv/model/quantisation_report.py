"""Reports, when a model is loaded, how many of its weights are quantised, and as what; refuses to quantise them again."""

from __future__ import annotations

import logging
from collections import Counter

from torch import nn

from radixkv.model.native import weights_of

_log = logging.getLogger(__name__)


def refuse_other_quantization(model: nn.Module, name: str, quantization: str | None) -> None:
    """Refuse to quantise a model that was packed for another LLM: its weights are no longer there as they were.

    Args:
        model: before it is prepared.
        name: of the model.
        quantization: the configured one; None: its weights stay as they are.

    Raises:
        ValueError: they are packed in another way.
    """
    kinds = {weight.kind for weight in weights_of(model)}
    if not kinds or quantization in (None, "gguf"):
        return
    # With int4, output heads are int8.
    packed_as = next((kind for kind in ("int4", "int8") if kind in kinds), None)
    if quantization != packed_as:
        expected = "None" if packed_as is None else f"{packed_as!r} or None"
        raise ValueError(
            f"quantization: expected {expected} for {name}, whose weights were packed when it was given to an LLM before, "
            f"got {quantization!r}: load it anew"
        )


def report_quantised(model: nn.Module, name: str, quantization: str | None, num_linears: int) -> None:
    """Write to the log how much of a model is quantised.

    Args:
        model: as it is prepared.
        name: of the model.
        quantization: the configured one.
        num_linears: how many linear layers it had.

    Raises:
        ValueError: quantisation is configured, and no weight is quantised.
    """
    counts: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for weight in weights_of(model):
        if weight.kind is not None:
            counts[weight.kind] += weight.num_weights
            num_bytes[weight.kind] += weight.nbytes
    if quantization is not None and not counts:
        reason = (
            "there is no GGUF file whose blocks could be kept, or none is Q8_0, Q4_0, Q4_1, Q4_K or Q6_K"
            if quantization == "gguf"
            else f"of its {num_linears} linear layers, none has a multiple of 32 inputs and is of a kind that can be replaced"
        )
        raise ValueError(f"quantization: expected None for {name}, got {quantization!r}: {reason}")
    if counts:
        what = quantization or "blocks of its file"
        megabytes = sum(num_bytes.values()) / 1e6
        _log.info(
            "%s: %s in %d linear layers, whose weights take %.1f MB (%s)",
            name,
            what,
            counts.total(),
            megabytes,
            ", ".join(f"{kind}: {count}" for kind, count in sorted(counts.items())),
        )
