"""What a checkpoint's configuration says of how it is quantised."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from radixkv.model.quantised import awq, compressed_tensors, float8, gptq, torchao
from radixkv.model.quantised.tensors import ModuleTensors, StoredMatrix, UnreadableError


class Method(NamedTuple):
    """How one format is read; see the file of each.

    Attributes:
        find: the quantised weight of a module; None: it is not quantised. Given the module's tensors, the weight's shape
            and the ``quantization_config``; it raises an `UnreadableError` where tensors are missing, or of other shapes
            or types.
        check_config: raises an `UnreadableError` if a ``quantization_config`` is of another layout. Not needed where tensors
            say how they are laid out.
    """

    find: Callable[[ModuleTensors, tuple[int, int], Mapping[str, Any]], StoredMatrix | None]
    check_config: Callable[[Mapping[str, Any]], None] = lambda config: None


METHODS = MappingProxyType(
    {
        "gptq": Method(gptq.find, gptq.check_config),
        "awq": Method(awq.find, awq.check_config),
        "compressed-tensors": Method(compressed_tensors.find, compressed_tensors.check_config),
        "torchao": Method(torchao.find),
        "fp8": Method(float8.find),
        "fbgemm_fp8": Method(float8.find),
    }
)
"""What is read here, by ``quant_method``."""


def quantisation_of(config: Any, folder: Path) -> dict[str, Any] | None:
    """A checkpoint's ``quantization_config``; None: it is not quantised.

    Args:
        config: of the model.
        folder: of the checkpoint. Older ones of GPTQ say it in a file beside the configuration.

    Raises:
        UnreadableError: it names its method by something else than a string.
    """
    given = getattr(config, "quantization_config", None)
    if given is None:
        beside = folder / "quantize_config.json"
        return {"quant_method": "gptq", **json.loads(beside.read_text())} if beside.exists() else None
    quantisation = dict(given if isinstance(given, Mapping) else given.to_dict())
    method = quantisation.get("quant_method")
    if not isinstance(method, str | None):
        raise UnreadableError(f"{folder}: quantization_config: quant_method: expected a string, got {method!r:.80}")
    return quantisation
