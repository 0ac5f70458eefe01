"""A digest of the sources that a library was compiled from; `setup.py` runs this file, too, without the package."""

from __future__ import annotations

import hashlib
from pathlib import Path


def source_digest(folder: Path) -> str:
    """A digest of all C++ files of a folder, their names and what is in them, as 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(f"{path.name}:{path.stat().st_size}:".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
