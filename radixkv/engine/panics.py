"""Panics of Rust code (tokenizers, grammars), which reach Python as a `BaseException`."""

from __future__ import annotations


def as_exception(error: BaseException) -> Exception:
    """The error itself or, where it is no `Exception`, a `RuntimeError` with it as its cause.

    For callers that wait for a result and handle no other errors.
    """
    if isinstance(error, Exception):
        return error
    interrupted = RuntimeError(f"interrupted: {error!r}")
    interrupted.__cause__ = error
    return interrupted
