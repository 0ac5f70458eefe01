"""What transformers' code of a model raises, which says nothing to whoever gave the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers

from radixkv.errors import EngineError, UnsupportedModelError, one_line
from radixkv.model.lack_of_memory import is_lack_of_memory


@contextmanager
def errors_of_model(model: transformers.PreTrainedModel) -> Iterator[None]:
    """Within, a model computes a few tokens; what its code raises becomes an `UnsupportedModelError` that names it.

    Some models want more than text, such as an image; others have a configuration by which their parts do not fit together.
    What is raised for lack of memory, or by a device that fails, stays as it is: the model is not to blame.

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
        if is_lack_of_memory(error):
            raise
        name = model.config.name_or_path or type(model).__name__
        raise UnsupportedModelError(
            f"{name}: {type(model).__name__} cannot compute a few tokens of text alone by this configuration: "
            f"{type(error).__name__}: {one_line(str(error))}"
        ) from error
