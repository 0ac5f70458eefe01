"""Packages that an extra of RadixKV brings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needing_extra(extra: str, argument: str | None = None) -> Iterator[None]:
    """For a block that imports what an extra brings.

    Args:
        extra: as in ``pip install 'radixkv[server]'``.
        argument: the one, or the name, that needs it; None: the command does, which whoever typed it knows.

    Raises:
        MissingPackageError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        # Imported only here: it imports the cache, for which `--help` should not wait.
        from radixkv.errors import MissingPackageError

        needed_by = "" if argument is None else f"{argument}: "
        advice = f"pip install 'radixkv[{extra}]'"
        raise MissingPackageError(f"{needed_by}{error.name} is not installed: {advice}") from error
