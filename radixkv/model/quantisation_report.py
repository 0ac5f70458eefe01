"""Reports, when a model was loaded, how many of its weights are quantised, and as what."""

from __future__ import annotations

import logging
from collections import Counter

from torch import nn

from radixkv.model.native import weights_of

_log = logging.getLogger(__name__)


def report_quantised(model: nn.Module, name: str, quantization: str | None, num_linears: int) -> None:
    """Write to the log how much of a model is quantised.

    Args:
        model: as it is prepared.
        name: of the model.
        quantization: what was asked for.
        num_linears: how many linear layers it had.

    Raises:
        ValueError: quantisation was asked for, and nothing is.
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
