"""Options of an engine whose model has recurrent layers: a state that tokens have changed cannot be taken back."""

from __future__ import annotations

from radixkv.config import EngineConfig, ResolvedEngineConfig


def for_recurrent_layers(given: EngineConfig, config: ResolvedEngineConfig) -> ResolvedEngineConfig:
    """An engine's options, without what computes tokens that may be dropped.

    Args:
        given: as the user gave them.
        config: with the device's defaults in place of each None.

    Raises:
        ValueError: drafts or asynchronous scheduling were asked for.
    """
    why = "for a model with recurrent layers, whose states cannot be taken back"
    if given.speculation is not None:
        raise ValueError(
            f"speculative_config: expected None {why} to before a wrong draft, got {given.speculation!r:.80}"
        )
    if given.async_scheduling:
        raise ValueError(f"async_scheduling: expected False {why} to before a token behind an answer's end, got True")
    return config.model_copy(update={"async_scheduling": False})
