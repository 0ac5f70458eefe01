"""Errors of transformers' code of a model, which do not name it, as errors that do."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers
from torch import nn

from radixkv.errors import EngineError, UnsupportedModelError, one_line
from radixkv.model.out_of_memory import is_out_of_memory

# Torch's error for sizes of experts that its grouped product does not take, and what takes them.
_GROUPED_SIZES = "strides should be multiple of 16 bytes"
_GROUPED_HINT = (
    "; its experts have sizes that torch's grouped product does not take: load it with transformers, call "
    "model.set_experts_implementation('eager'), and give the model itself"
)


def name_of(model: transformers.PreTrainedModel) -> str:
    """What errors call a loaded model: where it came from, or its class."""
    name: str = model.config.name_or_path or type(model).__name__
    return name


@contextmanager
def errors_of_model(model: transformers.PreTrainedModel) -> Iterator[None]:
    """Within, a model computes a few tokens; what its code raises becomes an `UnsupportedModelError` that names it.

    Some models need more than text, such as an image; others have a configuration by which their parts do not fit together.
    What is raised for lack of memory, by a device that fails, or by a module that stands in for one of the model's, stays as
    it is: the model is not its cause.

    Args:
        model: that computes.

    Raises:
        UnsupportedModelError: it cannot.
    """
    try:
        yield
    except (EngineError, torch.AcceleratorError):
        raise
    except Exception as error:  # of any class, from code that is not ours
        if is_out_of_memory(error) or type(_innermost_module(error)).__module__.startswith("radixkv."):
            raise
        hint = _GROUPED_HINT if _GROUPED_SIZES in str(error) else ""
        raise UnsupportedModelError(
            f"{name_of(model)}: {type(model).__name__} cannot compute a few tokens of text alone by this configuration: "
            f"{type(error).__name__}: {one_line(str(error))}{hint}"
        ) from error


def _innermost_module(error: Exception) -> nn.Module | None:
    """The module that was computing when this was raised."""
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((owner for owner in reversed(owners) if isinstance(owner, nn.Module)), None)
