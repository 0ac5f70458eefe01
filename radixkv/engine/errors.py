"""What an engine can refuse or fail with, besides the cache's and the loader's own errors."""

from __future__ import annotations


class EngineError(Exception):
    """Base of the engine's errors."""


class RequestTooLargeError(EngineError, ValueError):
    """The request could never fit, however empty the engine is; the message gives the figures."""


class NoBlocksLeftError(EngineError):
    """A request could not go on, although nothing else was running: holds keep its blocks."""
