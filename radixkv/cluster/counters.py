"""What engines have counted since they were made, as numbers that are sent, kept and added up.

A total must not fall when a replica leaves: Prometheus would take that for a restart. So the last numbers of every engine
count for ever, by the name of its process, which is another one after a restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from radixkv.cache.stats import CacheStats
from radixkv.engine.stats import EngineStats
from radixkv.outputs import DraftCounts
from radixkv.tiers.stats import StoreStats, TierTotals

_OF_THE_ENGINE = ("num_preemptions", "num_steps")
_OF_ALL_TIERS = ("loads", "loads_given_up", "loads_not_worth_it", "dropped_blocks")
# Engines whose own numbers are kept, beside as many as are up: one that was silent while so many others reported has ended.
_MAX_ENDED = 1000


def counters_of(stats: EngineStats) -> dict[str, float]:
    """What an engine has counted, each under its own name: ``num_steps``, ``cache/reused_tokens``, ``tiers/disk/errors``."""
    counters = {name: getattr(stats, name) for name in _OF_THE_ENGINE}
    parts = [("cache", asdict(stats.cache))]
    parts += [(f"drafts/{source}", asdict(counts)) for source, counts in stats.drafts.items()]
    if stats.tiers is not None:
        parts.append(("tiers", {name: getattr(stats.tiers, name) for name in _OF_ALL_TIERS}))
        parts += [(f"tiers/{medium}", asdict(each)) for medium, each in stats.tiers.tiers]
    return counters | {f"{part}/{name}": value for part, numbers in parts for name, value in numbers.items()}


def stats_of(counters: Mapping[str, float]) -> dict[str, Any]:
    """The fields of `EngineStats` that are counted."""

    def part(kind: type, prefix: str) -> Any:
        return kind(**{each.name: counters.get(f"{prefix}/{each.name}", 0) for each in fields(kind)})

    def named(prefix: str) -> list[str]:
        """Sources or media, in the order in which they were met."""
        inner = (name.removeprefix(prefix).rpartition("/")[0] for name in counters if name.startswith(prefix))
        return [name for name in dict.fromkeys(inner) if name]

    media = tuple((medium, part(StoreStats, f"tiers/{medium}")) for medium in named("tiers/"))
    totals = {name: int(counters.get(f"tiers/{name}", 0)) for name in _OF_ALL_TIERS}
    return {
        **{name: counters.get(name, 0) for name in _OF_THE_ENGINE},
        "cache": part(CacheStats, "cache"),
        "drafts": {source: part(DraftCounts, f"drafts/{source}") for source in named("drafts/")},
        "tiers": TierTotals(media, **totals) if media else None,
    }


class CounterTotals:
    """The sums over all engines that ever reported, in 2 KB for each that is up, and 2 MB at most for the others."""

    def __init__(self) -> None:
        self._latest: dict[str, Mapping[str, float]] = {}  # of each engine; those that reported last are at the end
        self._ended: Counter[str] = Counter()

    def report(self, instance: str, counters: Mapping[str, float], *, num_up: int = 0) -> None:
        """Take note of an engine's counters.

        Args:
            instance: the engine's process.
            counters: from `counters_of`.
            num_up: engines that are up, and will report again.
        """
        self._latest.pop(instance, None)
        self._latest[instance] = counters
        if len(self._latest) > _MAX_ENDED + num_up:
            self._ended.update(self._latest.pop(next(iter(self._latest))))

    def totals(self) -> dict[str, float]:
        """The sums, by name."""
        totals = self._ended.copy()
        for counters in self._latest.values():
            totals.update(counters)
        return dict(totals)
