"""Replicas in the test's own process: each an engine of its own behind a Unix socket, which can be cut off at any moment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
import uvicorn
from support.pretended_replicas import SECRET
from support.time_limit import HANGING

from radixkv import LLM, AsyncLLM
from radixkv.cluster import ReplicaSet, create_ingress, replica_app
from radixkv.config import ModelConfig
from radixkv.model.tokenizer import tokenizer_digest
from radixkv.sampling.grammar.tokenizer import grammar_tokenizer
from radixkv.server.config import ServerConfig

# What is made of a tokenizer, once for all replicas and ingresses that have it: that takes them longer than all else.
_DIGEST, _FOR_GRAMMARS = cache(tokenizer_digest), cache(grammar_tokenizer)


def tiny_model(vocab_size: int, seed: int = 0, *, length: int = 2048) -> transformers.LlamaForCausalLM:
    """A tiny random model; the same one for the same seed."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
        initializer_range=0.3,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


def tiny_llm(tokenizer: Any, seed: int = 0, **options: Any) -> LLM:
    """`tiny_model` with a real tokenizer, by which it reads and writes."""
    model = tiny_model(len(tokenizer), seed)
    return LLM(model, **{"tokenizer": tokenizer, "num_blocks": 300, "block_size": 16, **options})


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class LocalReplica:
    """One replica's server.

    Args:
        llm: its engine.
        path: of its socket.
    """

    def __init__(self, llm: AsyncLLM, path: Path) -> None:
        self.llm = llm
        self.url = f"unix://{path}"
        self._path = path
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen."""
        app = replica_app(self.llm, SECRET)
        config = uvicorn.Config(app, uds=str(self._path), lifespan="off", log_config=None, access_log=False, ws="none")
        self._server = _Server(config)
        self._serving = asyncio.ensure_future(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0)

    async def kill(self) -> None:
        """Listen no more, and break off every connection in the middle of what it is sending."""
        assert self._server is not None
        assert self._serving is not None
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self._server.force_exit = self._server.should_exit = True
        await self._serving
        self._path.unlink(missing_ok=True)


@asynccontextmanager
async def local_replicas(
    folder: Path, *llms: LLM, **options: Any
) -> AsyncIterator[tuple[ReplicaSet, list[LocalReplica]]]:
    """A replica of each engine, all of them in a set, named "0", "1" and so on.

    Meanwhile none is down because it is silent: what they send comes from the event loop that waits for it, which a busy
    machine may hold up for any time.
    """
    replicas = [LocalReplica(AsyncLLM(llm), folder / f"{number}.sock") for number, llm in enumerate(llms)]
    together = ReplicaSet(SECRET, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("radixkv.cluster.replica_set._SECONDS_OF_SILENCE", HANGING)
        patch.setattr("radixkv.cluster.connection._SECONDS_TO_CONNECT", HANGING)
        for module in ("describe", "replica_text"):
            patch.setattr(f"radixkv.cluster.{module}.tokenizer_digest", _DIGEST)
        patch.setattr("radixkv.sampling.grammar.compiler.grammar_tokenizer", _FOR_GRAMMARS)
        try:
            for number, replica in enumerate(replicas):
                await replica.start()
                await together.add(str(number), replica.url)
            yield together, replicas
        finally:
            await together.close()
            for replica in replicas:
                await replica.kill()
                await replica.llm.shutdown()


async def drain(replica: LocalReplica) -> None:
    replica.llm.start_draining()


@asynccontextmanager
async def one_more(replicas: ReplicaSet, llm: Any, path: Path, name: str) -> AsyncIterator[LocalReplica]:
    """A replica that joins a set of them. Its socket has this path."""
    replica = LocalReplica(AsyncLLM(llm), path)
    await replica.start()
    try:
        await replicas.add(name, replica.url)
        yield replica
    finally:
        await replica.kill()
        await replica.llm.shutdown()


@asynccontextmanager
async def ingress_client(
    replicas: ReplicaSet, tokenizer: Any, *, chat_template: str | None = None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    model_config = ModelConfig(tokenizer=tokenizer, chat_template=chat_template)
    ingress = create_ingress(ServerConfig(admin_key="admin", **options), replicas, model_config=model_config)
    transport = httpx.ASGITransport(ingress, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    await ingress.llm.shutdown()
