"""The files in which benches leave what they have measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_figures(path: Path, figures: Mapping[str, Any]) -> None:
    """Write a bench's figures as JSON, a line for each, so that changes of committed ones can be read."""
    path.write_text(json.dumps(figures, indent=1) + "\n")
