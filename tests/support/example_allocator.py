"""The cache of `examples/test_an_allocator.py`, from which tests derive broken ones."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import test_an_allocator as example

__all__ = ["example"]
