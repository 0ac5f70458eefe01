"""`GET /live`, what the page at `/` shows: the state of the engine, limited to what one tenant may see.

A snapshot is taken on the engine's thread between two steps, in bounded time, and at most twice a second per tenant. Token
ids are decoded on the tokenizer's thread.

A tenant sees the texts and trees of its own namespaces, and the total numbers of blocks and requests. Without API keys, all
clients share one tenant: then prompts with a cache salt are hidden, and all prompts where clients may be on other machines.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel

from radixkv import __version__
from radixkv.cache import NodeOutline
from radixkv.cache.tokens import decode
from radixkv.engine.stats import EngineStats
from radixkv.namespaces import salt_of
from radixkv.sampling.detokenizer import decode_tokens
from radixkv.server.access.authentication import CurrentTenant
from radixkv.server.access.tenants import Tenant
from radixkv.server.service import Service

if TYPE_CHECKING:
    from radixkv.async_llm import AsyncLLM
    from radixkv.engine.engine import Engine
    from radixkv.scheduling.request import SequenceGroup

_MAX_NODES = 120
_MAX_REQUESTS = 12
_REFRESH_SECONDS = 0.5

_Progress = Literal["running", "waiting"]


class Blocks(BaseModel):
    """The cache's blocks by state: those in use are live sequences' or pinned, cached ones may be evicted."""

    total: int
    in_use: int
    cached: int
    free: int
    block_size: int


class Tokens(BaseModel):
    """Prompt tokens since the server started."""

    queried: int
    reused: int
    computed: int


class TierState(BaseModel):
    """What a tier below the pool has done since the server started, in blocks."""

    medium: str
    loaded: int
    missed: int
    written: int


class TreeNode(BaseModel):
    """One node of the radix tree.

    Attributes:
        key: identifies a node among its siblings, the same in every snapshot.
        text: of its first tokens.
        users: live sequences that use it.
        age: seconds since a sequence last started or ended here or below.
        hidden: number of children that are not shown.
    """

    key: int
    text: str
    tokens: int
    blocks: int
    users: int
    age: float
    hidden: int
    children: list[TreeNode]


class Tree(BaseModel):
    """One namespace: the tenant's own, or one of its cache salts."""

    namespace: str
    hidden: int
    children: list[TreeNode]


class RequestState(BaseModel):
    """A request of the tenant, or one sample of it."""

    id: str
    state: _Progress
    prompt_tokens: int
    cached_tokens: int | None
    generated_tokens: int
    sequences: int


class LiveState(BaseModel):
    """Everything on the page."""

    model: str
    version: str
    draining: bool
    running: int
    waiting: int
    preemptions: int
    evicted_blocks: int
    blocks: Blocks
    tokens: Tokens
    tiers: list[TierState]
    requests: list[RequestState]
    trees: list[Tree]


def live_state(
    model: str,
    draining: bool,
    stats: EngineStats,
    block_size: int,
    requests: list[RequestState],
    trees: list[Tree],
) -> LiveState:
    """The counts of one engine or several, with what one tenant may see of its requests and trees."""
    return LiveState(
        model=model,
        version=__version__,
        draining=draining,
        running=stats.num_running,
        waiting=stats.num_waiting,
        preemptions=stats.num_preemptions,
        evicted_blocks=stats.cache.evicted_blocks,
        blocks=Blocks(
            total=stats.num_blocks,
            in_use=stats.num_blocks_in_use,
            cached=stats.num_evictable_blocks,
            free=stats.num_free_blocks,
            block_size=block_size,
        ),
        tokens=Tokens(
            queried=stats.cache.queried_tokens,
            reused=stats.cache.reused_tokens,
            computed=stats.cache.computed_tokens,
        ),
        tiers=[
            TierState(medium=medium, loaded=each.hit_blocks, missed=each.missed_blocks, written=each.written_blocks)
            for medium, each in (() if stats.tiers is None else stats.tiers.tiers)
        ],
        requests=requests,
        trees=trees,
    )


@dataclass(frozen=True, slots=True)
class _EngineSnapshot:
    """What is copied on the engine's thread."""

    trees: list[tuple[str, NodeOutline]]
    requests: list[RequestState]
    now: float
    block_size: int


@dataclass(slots=True)
class _Latest:
    """A tenant's latest snapshot, and when it was taken."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    state: LiveState | None = None
    captured_at: float = 0.0


def live_state_routes(service: Service, llm: AsyncLLM) -> APIRouter:
    """`GET /live`, which the page polls once a second."""
    router = APIRouter()
    # By tenant, each with its own lock: a tenant's snapshot may wait for its other tokenizing, the others' do not.
    latest_of: defaultdict[str, _Latest] = defaultdict(_Latest)

    @router.get("/live", tags=["observation"])
    async def live(tenant: CurrentTenant) -> LiveState:
        """The state of the engine: blocks, requests, and the radix tree of the key's own prompts."""
        latest = latest_of[tenant.name]
        async with latest.lock:
            if latest.state is None or time.monotonic() - latest.captured_at > _REFRESH_SECONDS:
                latest.state = await _capture(service, llm, tenant)
                latest.captured_at = time.monotonic()
            return latest.state

    return router


async def _capture(service: Service, llm: AsyncLLM, tenant: Tenant) -> LiveState:
    """The engine's state as far as a tenant may see it."""
    snapshot = await llm.call(partial(_snapshot_engine, _visible(service, tenant)))
    trees = await llm.run_tokenizer(
        lambda loaded: [_tree(namespace, root, snapshot, loaded.tokenizer) for namespace, root in snapshot.trees],
        tenant=tenant.name,
        num_slots=0,
    )
    return live_state(service.model_name, llm.draining, llm.stats, snapshot.block_size, snapshot.requests, trees)


def _visible(service: Service, tenant: Tenant) -> Callable[[str], bool]:
    """A predicate: whether a tenant may see what is in a namespace."""
    if service.hides_prompts:
        return lambda namespace: False
    if service.tenants.open_to_all:
        return lambda namespace: namespace == tenant.namespace()
    return tenant.owns


def _snapshot_engine(visible: Callable[[str], bool], engine: Engine) -> _EngineSnapshot:
    cache, scheduler = engine.cache, engine.scheduler
    trees: list[tuple[str, NodeOutline]] = []
    node_budget = _MAX_NODES
    for namespace in itertools.islice(filter(visible, cache.namespaces), _MAX_NODES):
        outline = cache.outline(namespace, node_budget)
        if outline is not None and outline.children:
            trees.append((namespace, outline))
            node_budget -= _num_nodes(outline)
    groups: Iterator[tuple[_Progress, SequenceGroup]] = itertools.chain(
        (("running", group) for group in scheduler.running), (("waiting", group) for group in scheduler.waiting)
    )
    own = (_request_state(state, group) for state, group in groups if visible(group.request.namespace))
    return _EngineSnapshot(trees, list(itertools.islice(own, _MAX_REQUESTS)), cache.now(), cache.block_size)


def _num_nodes(outline: NodeOutline) -> int:
    return sum(1 + _num_nodes(child) for child in outline.children)


def _request_state(state: _Progress, group: SequenceGroup) -> RequestState:
    request = group.request
    return RequestState(
        id=request.request_id,
        state=state,
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=request.num_cached_tokens,
        generated_tokens=len(group.sequences[0].output_token_ids),
        sequences=len(group.sequences),
    )


def _tree(namespace: str, root: NodeOutline, snapshot: _EngineSnapshot, tokenizer: Any) -> Tree:
    # Of a namespace derived from a salt, only enough is shown to distinguish it from the others.
    salt = salt_of(namespace)
    return Tree(
        namespace=f"salt {salt[:6]}" if salt else "",
        hidden=root.num_hidden,
        children=[_node(child, snapshot.now, tokenizer) for child in root.children],
    )


def _node(outline: NodeOutline, now: float, tokenizer: Any) -> TreeNode:
    return TreeNode(
        key=outline.key,
        text=" ".join(decode_tokens(tokenizer, decode(outline.beginning).tolist(), skip_special_tokens=True).split()),
        tokens=outline.num_tokens,
        blocks=outline.num_blocks,
        users=outline.lock_count,
        age=now - outline.last_use,
        hidden=outline.num_hidden,
        children=[_node(child, now, tokenizer) for child in outline.children],
    )
