"""What transformers says while a model is loaded, kept from whoever loads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging


@contextmanager
def silence_transformers() -> Iterator[None]:
    """No progress bars or warnings from transformers within; afterwards as the program has set them."""
    level, has_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if has_bars:
            transformers_logging.enable_progress_bar()
