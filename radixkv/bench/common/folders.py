"""Keeps the folders of the measuring machine out of published figures."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import radixkv

_ROOT = Path(radixkv.__file__).parents[1]


def without_folders(text: str) -> str:
    """A text, such as a traceback, without where Python, its packages and the checkout are."""
    text = text.replace(sys.executable, "python")
    for folder in (_ROOT, *map(Path, sys.path), Path(sys.prefix)):
        if folder.is_absolute() and folder != Path(folder.anchor):
            text = text.replace(f"{folder}{os.sep}", "")
    return text
