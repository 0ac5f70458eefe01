"""Suppresses transformers' warnings and progress bars while a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import ClassVar

from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
from transformers.utils import logging as transformers_logging


class _Silence:
    """Per process, as transformers' settings are: several models may be loaded at the same time."""

    lock: ClassVar[Lock] = Lock()
    num_within: ClassVar[int] = 0
    level: ClassVar[int]
    has_bars: ClassVar[bool]
    hub_has_bars: ClassVar[bool]


@contextmanager
def silence_transformers() -> Iterator[None]:
    """No progress bars or warnings from transformers within; once no thread is within, as the program has set them."""
    with _Silence.lock:
        if not _Silence.num_within:
            _Silence.level = transformers_logging.get_verbosity()
            _Silence.has_bars = transformers_logging.is_progress_bar_enabled()
            _Silence.hub_has_bars = not are_progress_bars_disabled()
            transformers_logging.set_verbosity_error()
            transformers_logging.disable_progress_bar()
        _Silence.num_within += 1
    try:
        yield
    finally:
        with _Silence.lock:
            _Silence.num_within -= 1
            if not _Silence.num_within:
                transformers_logging.set_verbosity(_Silence.level)
                if _Silence.has_bars:  # which enables the hub's, too
                    transformers_logging.enable_progress_bar()
                if not _Silence.hub_has_bars:
                    disable_progress_bars()
