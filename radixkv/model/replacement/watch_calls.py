"""Calls of a model's modules, watched for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn


@contextmanager
def watch_calls(
    modules: Iterable[nn.Module], note: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
) -> Iterator[None]:
    """Within, ``note`` is called before each call of one of these modules, with the module and its arguments."""
    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
        yield
