"""Commands whose packages an extra of RadixKV brings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needing_extra(extra: str) -> Iterator[None]:
    """For a block that imports what an extra brings.

    Args:
        extra: as in ``pip install 'radixkv[server]'``.

    Raises:
        MissingPackageError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        # Imported only here: it imports the cache, for which `--help` should not wait.
        from radixkv.errors import MissingPackageError

        raise MissingPackageError(f"{error.name} is not installed: pip install 'radixkv[{extra}]'") from error
