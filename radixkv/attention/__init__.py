"""Which queries read which blocks (the plan), and the backends that carry it out."""

from radixkv.attention.backend import AttentionBackend, AttentionBatch
from radixkv.attention.plan import AttentionPlan, QueryChunk, WorkItem, build_plan
from radixkv.attention.query_batch import QueryBatch

__all__ = ["AttentionBackend", "AttentionBatch", "AttentionPlan", "QueryBatch", "QueryChunk", "WorkItem", "build_plan"]
