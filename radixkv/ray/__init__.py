"""Engines placed, healed and scaled by Ray Serve (`pip install 'radixkv[ray]'`), on top of `radixkv.cluster`.

::

    local.py                `radixkv serve --replicas`: an application of its own, until a signal comes
    application.py          what is deployed, by options.py: ingress.py and engine.py, which find each other by registry.py
    calls.py                from one part to another, which may be gone
    scaling.py              how many engines there should be
    memory.py               how much of it they will take
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["app"]


def app(arguments: Mapping[str, Any]) -> Application:
    """A Ray Serve application, for `serve run radixkv.ray:app model=... replicas=2` and for Serve's configuration files.

    Args:
        arguments: options of `radixkv serve` by name; text as `serve run` passes it, or values of the option's type. With
            ``host`` or ``port``, the ingresses listen there themselves; without, requests come by Serve's proxy.

    Raises:
        TypeError: an argument is unknown.
        ValueError: a value is impossible.
    """
    from radixkv.ray.application import build
    from radixkv.ray.options import ApplicationOptions

    return build(ApplicationOptions.of(arguments))
