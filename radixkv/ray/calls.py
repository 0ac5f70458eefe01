"""Calls between the parts of an application, any of which may be gone or just be starting."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from radixkv.ray.registry import RENEWAL_SECONDS

_log = logging.getLogger(__name__)

# A call to a process that is being restarted waits until it is back, which takes seconds.
_SECONDS_FOR_CALL = 30.0

_T = TypeVar("_T")

# What a call raises when the other end is gone, is not there yet, or does not answer.
UNREACHABLE = (RayError, RayServeException, TimeoutError)


async def answer_of(call: Awaitable[_T], seconds: float = _SECONDS_FOR_CALL) -> _T:
    """What a handle's call returns.

    Args:
        call: of a handle.
        seconds: to wait for it.

    Raises:
        Exception: one of `UNREACHABLE`; or what the other end raised.
    """
    async with asyncio.timeout(seconds):
        return await call


async def shared_secret(registry: DeploymentHandle) -> str:
    """The secret of all replicas and ingresses of the application. The registry is asked until it gives one.

    Args:
        registry: the handle of the `Registry`.
    """
    proposed = secrets.token_hex(32)
    while True:
        try:
            secret: str | None = await answer_of(registry.secret.remote(proposed))
            if secret is not None:
                return secret
        except UNREACHABLE as error:
            _log.warning("asking the registry for the secret: %r; trying again", error)
        await asyncio.sleep(RENEWAL_SECONDS)


async def repeat(what: str, step: Callable[[], Awaitable[object]], seconds: float) -> None:
    """Do something again and again, with a pause in between, whether or not it succeeded the last time.

    Args:
        what: is done, for the log.
        step: does it once.
        seconds: of the pause.
    """
    failing = False
    while True:
        try:
            await step()
            failing = False
        except UNREACHABLE as error:
            if not failing:
                _log.warning("%s: %r; trying again", what, error)
            failing = True
        await asyncio.sleep(seconds)
