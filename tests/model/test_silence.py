"""What transformers says while models are loaded."""

from __future__ import annotations

from threading import Event, Thread

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
