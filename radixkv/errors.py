"""Every error that a user of the library can meet.

The cache's own errors are defined in `radixkv.cache`, which can be used alone, and are available here, too.
"""

from __future__ import annotations

from typing import Any

from radixkv.cache.errors import (
    CacheError,
    ClosedError,
    InvalidArgumentError,
    InvariantViolation,
    OutOfBlocks,
    PinQuotaExceeded,
)

__all__ = [
    "CacheError",
    "ClosedError",
    "DrainingError",
    "EngineDeadError",
    "EngineError",
    "InvalidArgumentError",
    "InvariantViolation",
    "MissingPackageError",
    "ModelLoadError",
    "NoBlocksLeftError",
    "OutOfBlocks",
    "PinQuotaExceeded",
    "PromptTooLongError",
    "QueueFullError",
    "ReplicasLostError",
    "RequestCrashesError",
    "RequestTimeoutError",
    "RequestTooLargeError",
    "StepFailedError",
    "StoreInUseError",
    "StructuredOutputError",
    "UnsupportedModelError",
]


class EngineError(Exception):
    """Base of the engine's errors."""


class ModelLoadError(EngineError):
    """A model does not exist or cannot be read; the message says what to do."""


class UnsupportedModelError(ModelLoadError):
    """A model cannot run over the cache's blocks; the message says why."""


class PromptTooLongError(EngineError, ValueError):
    """The prompt leaves the model no room for a token; the message gives the figures."""


class RequestTooLargeError(EngineError, ValueError):
    """The request could never fit, however empty the engine is; the message gives the figures."""


class NoBlocksLeftError(EngineError):
    """A request could not go on, although nothing else was running: pins keep its blocks."""


class StructuredOutputError(EngineError, ValueError):
    """A request's grammar cannot be followed further."""


class ReplicasLostError(EngineError):
    """A request could not be finished: every replica that it was sent to failed, or none is left."""


class RequestCrashesError(EngineError):
    """Two replicas had a request when they died, at the same token: it would probably crash others."""


class StepFailedError(EngineError):
    """The step that a request was in crashed; the cause says how. Other requests go on."""


class MissingPackageError(ImportError):
    """A call needs a package that is not installed; the message names the package and the argument that needs it."""


class RequestTimeoutError(EngineError):
    """A request exceeded a time limit; the message says which.

    Attributes:
        in_queue: whether the request was still in the queue, so that nothing has been done for it.
    """

    def __init__(self, message: str, in_queue: bool) -> None:
        super().__init__(message)
        self.in_queue = in_queue

    def __reduce__(self) -> tuple[Any, ...]:  # otherwise copies would be made from the message alone
        return type(self), (str(self), self.in_queue), vars(self)


class QueueFullError(EngineError):
    """Too many requests are unfinished (``max_queue`` of `AsyncLLM`); the message gives the figures.

    Attributes:
        retry_after: seconds after which there is likely to be room.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:  # as above
        return type(self), (str(self), self.retry_after), vars(self)


class StoreInUseError(EngineError):
    """A folder of stored blocks belongs to another process; the message names it."""


class DrainingError(EngineError):
    """No new requests are accepted: the engine is finishing its requests, or has stopped."""


class EngineDeadError(EngineError):
    """The engine's bookkeeping is broken, so it takes no further step; the cause says why."""


def one_line(text: str) -> str:
    """The beginning of an error message of other code, in one line."""
    return " ".join(text.split())[:300]


def first_line(error: Exception) -> str:
    """The first line of what other code says of an error; its class where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
