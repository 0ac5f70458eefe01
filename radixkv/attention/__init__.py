"""Which queries read which blocks (the plan), and the backends that carry it out."""

from radixkv.attention.plan import AttentionPlan, QueryChunk, WorkItem, build_plan

__all__ = ["AttentionPlan", "QueryChunk", "WorkItem", "build_plan"]
