"""The files in which benches leave what they have measured."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_figures(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Write a bench's figures as JSON, a line for each, so that changes of committed ones can be read.

    A file is replaced as a whole: a bench that is killed leaves no half of one. A link keeps leading to its file. What cannot
    be replaced is written to: a device, a pipe, or a file whose folder may not be written.

    Args:
        path: None: the figures are not wanted.
    """
    if path is None:
        return
    text = json.dumps(figures, indent=1) + "\n"
    file = path.resolve()
    if (path.exists() and not path.is_file()) or not os.access(file.parent, os.W_OK):
        path.write_text(text)
        return
    new = file.with_name(file.name + ".new")
    new.write_text(text)
    new.replace(file)
