"""Engines placed, healed and scaled by Ray Serve (`pip install 'radixkv[ray]'`), on top of `radixkv.cluster`."""

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
