"""Several engines that answer as one: their private interface, and streams that survive the engine they are on."""

from radixkv.cluster.replica_app import replica_app
from radixkv.cluster.streams import ReplicaStreams

__all__ = ["ReplicaStreams", "replica_app"]
