"""What an ingress is made of, where its caller gives it a log and a tracer, and leaves the rest to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import httpx
import pytest
from support.pretended_replicas import SECRET, Cluster, answering, line
from support.tenant_keys import bearer, entry
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from radixkv.cluster import ReplicaSet, create_ingress
from radixkv.config import ModelConfig
from radixkv.model.tokenizer import tokenizer_digest
from radixkv.server.access.tenants import Tenants
from radixkv.server.config import ServerConfig

CONFIG = ServerConfig(admin_key="admin", api_keys=("ann", "bob"))
REQUEST = {"prompt": [1], "max_tokens": 1}
# A small one is read, and prepared for grammars, at once.
TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({f"word{token_id}": token_id for token_id in range(50)}))
)


class Sent:
    """Ingresses whose replica answers with a token, and the namespaces of what they send it."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        self.cluster.identities["http://a"] = {"tokenizer": tokenizer_digest(None)}  # any
        self.cluster.answers["/generate"] = self._generate
        self.namespaces = list[str]()

    async def _generate(self, request: httpx.Request) -> httpx.Response:
        self.namespaces.append(json.loads(await request.aread())["namespace"])
        return await answering(line(7, "length"))(request)

    async def post(
        self,
        path: str,
        key: str,
        *,
        changes: Mapping[str, Any] = MappingProxyType({}),
        config: ServerConfig = CONFIG,
        secret: str = SECRET,
        **options: Any,
    ) -> list[int]:
        """Statuses of a request with this key, and of a completion after it, at an ingress of its own."""
        replicas = ReplicaSet(secret, connect=self.cluster.connect)
        await replicas.add("a", "http://a")
        ingress = create_ingress(config, replicas, model_config=ModelConfig(tokenizer=TOKENIZER), **options)
        transport = httpx.ASGITransport(ingress)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            first = await client.post(path, json={**REQUEST, **changes}, headers=bearer(key))
            second = await client.post("/v1/completions", json=REQUEST, headers=bearer("ann"))
        await ingress.llm.shutdown()
        await replicas.close()
        return [first.status_code, second.status_code]


def test_requests_are_logged_and_traced() -> None:
    sdk, export = (pytest.importorskip(f"opentelemetry.sdk.trace{part}") for part in ("", ".export"))
    in_memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    log, exporter, provider = list[str](), in_memory.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    options = {"write_log": log.append, "tracer": provider.get_tracer("test")}
    assert asyncio.run(Sent().post("/v1/completions", "ann", **options)) == [200, 200]
    assert len(log) == 2
    requests = [span.name for span in exporter.get_finished_spans() if span.parent is None]
    assert requests == ["POST /v1/completions"] * 2


def test_draining_an_ingress_refuses_new_requests_unless_drain_is_given() -> None:
    drained = list[str]()
    sent = Sent()
    assert asyncio.run(sent.post("/admin/drain", "admin")) == [200, 503]
    assert asyncio.run(sent.post("/admin/drain", "admin", drain=lambda: drained.append("drained"))) == [200, 200]
    assert drained == ["drained"]


def test_ingresses_of_the_same_replicas_name_a_tenant_s_namespace_alike() -> None:
    """Otherwise, none would find what another one's requests have cached."""
    sent = Sent()
    for key, secret in (("ann", SECRET), ("bob", SECRET), ("ann", SECRET + " not")):
        assert asyncio.run(sent.post("/v1/completions", key, secret=secret)) == [200, 200]
    first, again, others, second, elsewhere, _ = sent.namespaces
    assert first == again == second != ""
    assert len({first, others, elsewhere}) == 3


@pytest.mark.parametrize(
    ("config", "share", "changes"),
    [
        ({"max_queue": 0}, {}, {"prompt": [[1]] * 5}),  # the replica runs four side by side
        ({"max_seqs_per_request": 1}, {}, {"n": 2}),
        ({}, {"max_num_seqs": 1}, {"n": 2}),
    ],
    ids=["queue", "sequences of a request", "sequences of a tenant"],
)
def test_what_exceeds_its_limits_reaches_no_replica(
    config: dict[str, Any], share: dict[str, Any], changes: dict[str, Any]
) -> None:
    sent = Sent()
    options = {
        "config": CONFIG.model_copy(update=config),
        "tenants": Tenants(admin_key="admin", keys={"ann": entry("ann", **share)}),
        "changes": changes,
    }
    assert asyncio.run(sent.post("/v1/completions", "ann", **options)) == [400, 200]
    assert len(sent.namespaces) == 1


def test_a_replica_that_is_about_to_be_known_as_down_is_not_called_broken() -> None:
    """For half a second after a replica had ended, a check of the caches was answered as if its cache were broken."""

    async def ended(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("planted")

    sent = Sent()
    sent.cluster.answers["/check"] = ended
    assert asyncio.run(sent.post("/admin/check", "admin")) == [503, 200]
