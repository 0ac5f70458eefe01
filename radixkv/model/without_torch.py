"""Processes that compute nothing, such as an ingress, do without torch, whose import is most of their start and their memory.

transformers imports torch where it is found, although its tokenizers use nothing of it. Where there is none, it offers
tokenizers and configurations, and no models.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def forgo_torch() -> None:
    """Make torch impossible to find in this process from now on; if it is imported already, this changes nothing.

    To be called before transformers is imported, which looks for it once. Only for programs, not for a library: it applies
    to all modules of the process.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # Python's own way to say that a module is not there
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it warns that it has found none


def call_with_torch(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call a function that needs torch: here, or in a process of its own if torch is not to be found in this one.

    Args:
        function: of a module, with arguments and a result that can be pickled.

    Raises:
        RuntimeError: the other process died.
        What the function raises.
    """
    if sys.modules.get("torch", sys) is not None:
        return function(*args, **kwargs)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
        return other.submit(function, *args, **kwargs).result()
