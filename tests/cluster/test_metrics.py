"""What an ingress counts of its replicas: each of them, and totals that never fall."""

from __future__ import annotations

import asyncio
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.replica_servers import ingress_client, local_replicas, tiny_llm

from radixkv import SamplingParams
from radixkv.cache.stats import CacheStats
from radixkv.cluster.counters import CounterTotals, counters_of, stats_of
from radixkv.engine.stats import BatchSize, EngineStats
from radixkv.outputs import DraftCounts
from radixkv.tiers.stats import StoreStats, TierTotals

TEXT = "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve."
NO_GAUGES: Any = dict.fromkeys(
    ("num_running", "num_waiting", "num_blocks", "num_free_blocks", "num_evictable_blocks"), 0
)


def counted(rng: random.Random, sources: list[str], media: list[str]) -> EngineStats:
    def some(kind: Any) -> Any:
        return kind(**{name: rng.randrange(1, 1000) for name in asdict(kind())})

    tiers = TierTotals(tuple((medium, some(StoreStats)) for medium in media), *(rng.randrange(9) for _ in range(4)))
    return EngineStats(
        **NO_GAUGES,
        num_preemptions=rng.randrange(9),
        num_steps=rng.randrange(999),
        last_batch=BatchSize(1, 1),
        cache=some(CacheStats),
        drafts={source: some(DraftCounts) for source in sources},
        tiers=tiers if media else None,
    )


def test_counters_come_back_as_what_they_were() -> None:
    rng = random.Random(0)
    for sources, media in (([], []), (["tree", "my/own drafter"], ["disk"]), (["prefix"], ["disk", "redis://host/0"])):
        stats = counted(rng, sources, media)
        back = stats_of(counters_of(stats))
        assert back == {name: getattr(stats, name) for name in back}
    assert stats_of({})["cache"] == CacheStats()


def test_totals_are_of_all_that_ever_reported_each_by_its_latest_numbers() -> None:
    totals = CounterTotals()
    for instance, steps in (("a", 5), ("b", 7), ("a", 9), ("after its restart", 1)):
        totals.report(instance, {"num_steps": steps, f"drafts/{instance}/accepted": 1})
    assert totals.totals()["num_steps"] == 9 + 7 + 1
    assert sum(totals.totals().values()) == 17 + 3


def test_what_is_kept_of_engines_does_not_grow_with_each_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that is restarted again and again made the totals ever slower to compute, at each scrape."""
    monkeypatch.setattr("radixkv.cluster.counters._MAX_ENDED", 3)
    totals = CounterTotals()
    for restart in range(100):
        totals.report("lasting", {"num_steps": 1000 + restart})
        totals.report(f"restarted {restart}", {"num_steps": 7})
        assert totals.totals() == {"num_steps": 1000 + restart + 7 * (restart + 1)}
    assert len(totals._latest) == 3


def test_engines_that_are_up_count_once_however_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than were kept, one that reported again was counted beside its own numbers of before."""
    monkeypatch.setattr("radixkv.cluster.counters._MAX_ENDED", 3)
    totals = CounterTotals()
    for steps in (5, 7):
        for number in range(10):
            totals.report(str(number), {"num_steps": steps}, num_up=10)
    assert totals.totals() == {"num_steps": 70}


async def test_an_ingress_shows_each_replica_and_totals_that_survive_it(default_tokenizer: Any, tmp_path: Path) -> None:
    llms = [tiny_llm(default_tokenizer, disk_cache=tmp_path / f"disk-{number}") for number in range(2)]
    async with (
        local_replicas(tmp_path, *llms) as (replicas, servers),
        ingress_client(replicas, default_tokenizer) as client,
    ):
        client.headers["Authorization"] = "Bearer admin"

        async def metrics(path: str = "/metrics") -> dict[tuple[str, str], float]:
            families = text_string_to_metric_families((await client.get(path)).text)
            samples = (sample for family in families for sample in family.samples)
            return {
                (each.name.removeprefix("radixkv:"), "/".join(each.labels.values())): each.value for each in samples
            }

        for server in servers:
            async for _ in server.llm.generate(TEXT, SamplingParams(max_tokens=3, ignore_eos=True)):
                pass
        steps = [server.llm.stats.num_steps for server in servers]
        while (before := await metrics())["num_steps_total", ""] < sum(steps):
            await asyncio.sleep(0.001)
        for number in range(2):
            assert before["replica_up", str(number)] == 1
            own = servers[number].llm.stats
            assert before["replica_prefix_cache_queries_total", str(number)] == own.cache.queried_tokens
            alone = await metrics(f"/admin/replicas/{number}/metrics")
            assert alone["num_steps_total", ""] == steps[number]
            states = ("free", "held", "evictable")
            blocks = [before["replica_kv_cache_blocks", f"{number}/{state}"] for state in states]
            assert blocks == [alone["kv_cache_blocks", state] for state in states]
        assert ("tier_errors_total", "disk") in before
        await servers[1].kill()
        while replicas.available != ["0"]:
            await asyncio.sleep(0.001)
        after = await metrics()
        assert (after["replica_up", "1"], after["replica_up", "0"]) == (0, 1)
        assert ("replica_num_requests_running", "1") not in after
        assert after["num_steps_total", ""] == sum(steps)
        assert after["prefix_cache_queries_total", ""] == before["prefix_cache_queries_total", ""]
        assert after["kv_cache_blocks", "free"] < before["kv_cache_blocks", "free"]
        await servers[0].kill()
        while replicas.available:
            await asyncio.sleep(0.001)
        assert (await metrics())["kv_cache_usage_perc", ""] == 0
        assert (await client.get("/admin/replicas/1/metrics")).status_code == 503
        assert (await client.get("/admin/replicas/2/metrics")).status_code == 404
