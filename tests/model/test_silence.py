"""What transformers says while models are loaded."""

from __future__ import annotations

from threading import Event, Thread

import pytest
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging as transformers_logging

from radixkv.model.silence import silence_transformers


def test_two_models_that_are_loaded_at_a_time_leave_transformers_as_it_was() -> None:
    """The second found the silence of the first, and left it to the program for good."""
    second_is_within, first_is_over = Event(), Event()

    def load_second() -> None:
        with silence_transformers():
            second_is_within.set()
            assert first_is_over.wait(600)
            silent.append((transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()))

    silent: list[tuple[int, bool]] = []
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_info()
    try:
        second = Thread(target=load_second, daemon=True)
        with silence_transformers():
            second.start()
            assert second_is_within.wait(600)
        first_is_over.set()
        second.join(600)
        assert silent == [(transformers_logging.ERROR, False)]
        assert transformers_logging.get_verbosity() == transformers_logging.INFO
        assert transformers_logging.is_progress_bar_enabled() == before[1]
    finally:
        transformers_logging.set_verbosity(before[0])


def test_progress_bars_of_the_hub_that_a_program_has_disabled_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were enabled with those of transformers, which the program had left."""
    monkeypatch.setattr(transformers_logging, "_tqdm_active", True)
    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        with silence_transformers():
            pass
        assert are_progress_bars_disabled()
        assert transformers_logging.is_progress_bar_enabled()
    finally:
        if not were_disabled:
            enable_progress_bars()
