"""Several engines that answer as one: their private interface, and streams that survive the engine they are on.

::

    in each replica:
      replica_routes.py     its private interface; wire.py: what is exchanged; describe.py, description.py: what it runs
      announcements.py      what ingresses get: feed.py, announced_requests.py, load.py, counters.py; records.py: as bytes
    in each ingress:
      ingress.py            the public server over replicas; cluster_routes.py, replica_metrics.py
      cluster_llm.py        all replicas as one model; replica_text.py: how it reads and writes text
      replica_set.py        which are up, and what they hold: member.py, connection.py, generations.py, idle_timeout.py
        membership.py       which are wanted
      streams.py            answers that go on when their replica is lost
        sent_request.py, attempt.py, losses.py                            what is sent, one try, and how often it is made
        answer_lines.py, answer_checks.py, received_answer.py             what comes back
      replica_calls.py      calls of one or all: replica_pins.py, replica_explanations.py, tenant_shares.py
    run.py                  the processes

The names below load on first use: what an ingress imports, which computes nothing, does without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.lazy_names import lazy_names

if TYPE_CHECKING:
    from radixkv.cluster.cluster_llm import ClusterLLM
    from radixkv.cluster.description import ReplicaDescription
    from radixkv.cluster.generations import MismatchError
    from radixkv.cluster.ingress import Ingress, create_ingress
    from radixkv.cluster.replica_routes import replica_app
    from radixkv.cluster.replica_set import ReplicaSet
    from radixkv.cluster.replica_text import text_interface
    from radixkv.cluster.streams import ReplicaStreams

__all__ = [
    "ClusterLLM",
    "Ingress",
    "MismatchError",
    "ReplicaDescription",
    "ReplicaSet",
    "ReplicaStreams",
    "create_ingress",
    "replica_app",
    "text_interface",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ClusterLLM": "cluster_llm",
        "Ingress": "ingress",
        "MismatchError": "generations",
        "ReplicaDescription": "description",
        "ReplicaSet": "replica_set",
        "ReplicaStreams": "streams",
        "create_ingress": "ingress",
        "replica_app": "replica_routes",
        "text_interface": "replica_text",
    },
    extra="cluster",
)
