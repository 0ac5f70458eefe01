"""What the server's routes share, put together from its configuration and what is served."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from radixkv.server.config import ServerConfig
from radixkv.server.metrics import ServerMetrics
from radixkv.server.served import ServedModel
from radixkv.server.service import Service, max_token_characters
from radixkv.server.tenants import Tenants
from radixkv.server.time_limits import TimeLimits
from radixkv.server.token_text import TokenTexts

if TYPE_CHECKING:
    from radixkv.async_llm import AsyncLLM


def assemble_service(
    llm: ServedModel,
    config: ServerConfig,
    tenants: Tenants,
    drain: Callable[[], None],
    obstacle: Callable[[], str | None] = lambda: None,
    engine: AsyncLLM | None = None,
) -> Service:
    """What all routes share.

    Args:
        llm: what is served.
        config: the server's.
        tenants: who may use it.
        drain: see `Service`.
        obstacle: likewise.
        engine: likewise.
    """
    model_name, *other_names = config.served_model_name or (llm.loaded.name,)
    return Service(
        llm=llm,
        model_name=model_name,
        other_names=tuple(other_names),
        tenants=tenants,
        metrics=ServerMetrics(llm),
        token_texts=TokenTexts(llm.loaded.tokenizer),
        max_token_characters=max_token_characters(llm.loaded),
        started=int(time.time()),
        drain=drain,
        time_limits=TimeLimits(config.queue_timeout, config.first_token_timeout, config.request_timeout),
        step_timeout=config.step_timeout,
        shows_prompts_without_keys=not config.allow_unauthenticated,
        obstacle=obstacle,
        engine=engine,
    )
