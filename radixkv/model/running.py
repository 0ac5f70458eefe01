"""The runner that computes a batch in this thread, which its model's layers find here.

Compiled layers and eager ones find it alike. It is not among their arguments: some models drop keyword arguments on the way
to their attention layers.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixkv.model.runner import ModelRunner

running: ContextVar[ModelRunner] = ContextVar("running")
"""Set while a model runs, and only then."""
