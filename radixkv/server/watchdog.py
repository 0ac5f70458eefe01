"""Ends an engine that is stuck, and the process even if no other code in it runs."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixkv.async_llm import AsyncLLM


_log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 1.0
# Further seconds before the process is ended abruptly, in case that code holds the GIL forever.
_MORE_SECONDS = 60.0


async def watch_engine(llm: AsyncLLM, step_timeout: float) -> None:
    """Give the engine up, as `AsyncLLM.abandon` does, when a step takes longer than so many seconds; returns then."""
    try:
        while llm.seconds_in_step <= step_timeout:
            faulthandler.dump_traceback_later(step_timeout + _MORE_SECONDS, exit=True)
            await asyncio.sleep(min(_INTERVAL_SECONDS, step_timeout / 4))
    except Exception:
        _log.exception("the engine is watched no longer: a step that never ends will not end the process")
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
    faulthandler.dump_traceback(file=sys.stderr)
    llm.abandon(f"its step has taken more than {step_timeout:g} seconds")
