"""Several engines that answer as one: their private interface, and streams that survive the engine they are on."""

from radixkv.cluster.cluster_llm import ClusterLLM, text_interface
from radixkv.cluster.description import ReplicaDescription
from radixkv.cluster.ingress import Ingress, create_ingress
from radixkv.cluster.replica_app import replica_app
from radixkv.cluster.replica_set import MismatchError, ReplicaSet
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
