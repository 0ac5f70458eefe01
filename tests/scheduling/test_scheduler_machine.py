"""Requests at random, without a model; `scheduler_driver` verifies every step."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.scheduler_driver import STEMS, SchedulerDriver, tail

from radixkv.scheduling.tenant_share import TenantShare


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, run, are aborted and preempted at random, with small caches, narrow windows and tight budgets."""

    @initialize(
        num_blocks=st.integers(24, 60),
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 6),
        window=st.integers(1, 5),
        max_overtaken=st.integers(0, 3),
        samples=st.sampled_from([1, 1, 3]),
        kind=st.sampled_from(["in step", "ahead", "with states"]),
        tenants=st.sampled_from([1, 1, 3]),
    )
    def start(self, samples: int, kind: str, tenants: int, **sizes: int) -> None:
        shares = {"b": TenantShare(weight=2.5), "c": TenantShare(weight=0.5, max_num_seqs=sizes["max_num_seqs"])}
        blocks: dict[str, Any] = {"block_size": 32, "splits_blocks": False} if kind == "with states" else {}
        self.driver = SchedulerDriver(**sizes, **blocks, ahead=kind == "ahead", shares=shares)
        self.tenants = ["", "b", "c"][:tenants]
        self.max_samples = min(samples, sizes["max_num_seqs"])

    @rule(
        stem=st.integers(0, 2),
        shared=st.integers(0, 40),
        own=st.integers(1, 20),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        max_new=st.integers(1, 30),
        ends_after=st.integers(1, 60),
        n=st.integers(1, 3),
        copies=st.integers(1, 4),
        tenant=st.integers(0, 2),
    )
    def add(self, stem: int, shared: int, own: int, n: int, copies: int, tenant: int, **options: int) -> None:
        n = min(n, self.max_samples)
        for _ in range(copies):
            prompt = STEMS[stem][:shared] + tail(len(self.driver.requests), own)
            self.driver.add(prompt, n=n, tenant=self.tenants[tenant % len(self.tenants)], **options)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.driver.has_work:
                self.driver.step()

    @precondition(lambda self: self.driver.requests)
    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        self.driver.abort(self.driver.requests[which % len(self.driver.requests)])

    @invariant()
    def cache_is_sound(self) -> None:
        if hasattr(self, "driver"):
            self.driver.cache.check()
            assert self.driver.num_free_seqs >= 0
            ranks = [group.rank for group in self.driver.scheduler.running]
            assert ranks == sorted(ranks)
            waiting = self.driver.scheduler.waiting
            assert waiting.num_uncached_tokens == sum(map(waiting.num_uncached, waiting))
            for group in waiting:
                assert 1 <= waiting.num_uncached(group) <= len(group.prefill_token_ids)
                assert all(each.table is None and each.num_computed == 0 for each in group.sequences)

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.run()
            cache = self.driver.cache
            assert cache.num_free_blocks + cache.num_evictable_blocks == cache.num_blocks


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=75, stateful_step_count=30, deadline=None)
