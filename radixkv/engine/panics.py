"""A panic in Rust code (tokenizers, grammars) reaches Python as a `BaseException`."""

from __future__ import annotations


def as_exception(error: BaseException) -> Exception:
    """The error itself or, where it is no `Exception`, a `RuntimeError` with it as its cause.

    For whoever waits for a result, and expects no other errors.
    """
    if isinstance(error, Exception):
        return error
    interrupted = RuntimeError(f"interrupted: {error!r}")
    interrupted.__cause__ = error
    return interrupted
