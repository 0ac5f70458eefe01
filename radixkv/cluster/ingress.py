"""The public server over replicas: the same application as over an engine of its own."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from radixkv.cluster.cluster_llm import ClusterLLM
from radixkv.cluster.cluster_routes import cluster_routes
from radixkv.cluster.replica_metrics import ReplicaCollector
from radixkv.cluster.replica_pins import ReplicaPins
from radixkv.cluster.replica_set import ReplicaSet
from radixkv.cluster.replica_text import text_interface
from radixkv.config import ModelConfig
from radixkv.server.access.tenants import Tenants
from radixkv.server.app import create_app
from radixkv.server.config import ServerConfig
from radixkv.server.operation.pins import pin_routes
from radixkv.server.pauses import prepare_grammars
from radixkv.server.run import make_tenants
from radixkv.server.service import Service

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


def tenant_names_key(secret: str) -> bytes:
    """The key by which an ingress names its tenants' namespaces: every ingress with the replicas' secret names them alike."""
    return hmac.digest(secret.encode(), b"radixkv namespaces", hashlib.sha256)


class Ingress:
    """An ASGI application that serves OpenAI's API with replicas.

    Attributes:
        llm: the replicas as one model.
        service: what the routes share.
    """

    def __init__(self, llm: ClusterLLM, service: Service, app: ASGIApp) -> None:
        self.llm = llm
        self.service = service
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def create_ingress(
    config: ServerConfig,
    replicas: ReplicaSet,
    *,
    model_config: ModelConfig | None = None,
    tenants: Tenants | None = None,
    drain: Callable[[], None] | None = None,
    write_log: Callable[[str], object] | None = None,
    tracer: Tracer | None = None,
) -> Ingress:
    """The server's application over replicas.

    It keeps nothing that matters: another one over the same replicas may answer the next request.

    Args:
        config: the server's; its ``model`` is where the tokenizer is found, by default the replicas' name of their model.
        replicas: with at least one that was reached; others may come and go.
        model_config: how answers are read, see `text_interface`.
        tenants: who may use it; None: those of ``config``.
        drain: what ``POST /admin/drain`` does; None: refuse new requests.
        write_log: called with each line of the access log; None: there is none.
        tracer: records spans of every request; None: nothing is recorded.

    Raises:
        RuntimeError: no replica was reached yet.
        ModelLoadError: there is no tokenizer.
        OSError: the keys cannot be read.
        ValueError: an option is impossible over replicas, or the keys are.
    """
    if config.queue_timeout is not None:
        raise ValueError("queue_timeout: how long requests wait on replicas is not known here; use first_token_timeout")
    if tenants is None:
        tenants = make_tenants(config, tenant_names_key(replicas.secret))
    llm = ClusterLLM(
        text_interface(replicas, config.model, model_config),
        replicas,
        model_config=model_config,
        max_queue=config.max_queue,
        max_seqs_per_request=config.max_seqs_per_request,
        tenants=tenants.shares,
    )
    prepare_grammars(llm.grammars)
    service = Service(llm, config, tenants, drain or llm.start_draining, unready_reason=replicas.unready_reason)
    service.metrics.registry.register(ReplicaCollector(replicas))
    routes = [cluster_routes(service, llm), pin_routes(service, ReplicaPins(replicas))]
    app = create_app(service, write_log=write_log, tracer=tracer, engine_routes=routes)
    return Ingress(llm, service, app)
