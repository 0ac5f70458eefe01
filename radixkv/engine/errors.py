"""What the engine can refuse or fail with, besides the cache's own errors."""

from __future__ import annotations


class EngineError(Exception):
    """Base of the engine's errors."""


class ModelLoadError(EngineError):
    """A model is not there or cannot be read; the message says what to do."""


class UnsupportedModelError(ModelLoadError):
    """A model cannot run over the cache's blocks; the message says why."""


class RequestTooLargeError(EngineError, ValueError):
    """The request could never fit, however empty the engine is; the message gives the figures."""


class NoBlocksLeftError(EngineError):
    """A request could not go on, although nothing else was running: pins keep its blocks."""
