"""Tables in README and documentation are those of the benches' JSON files, to the last digit."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.committed_figures import (
    BENCHMARKS,
    CPU,
    MEASURED_CLUSTER,
    MEASURED_DRAFTS,
    MEASURED_SERVER,
    MEASURED_TIERS,
    README,
    ROOT,
    results,
    table,
)

from radixkv.bench.common.percentiles import p99


def end_to_end() -> str:
    rows = [
        (
            row["name"],
            f"{statistics.median(row['generate_s']):.2f}",
            f"{statistics.median(row['radixkv_s']):.2f}",
            f"{row['ratio']:.1f}",
            row["equal_answers"],
        )
        for row in results("e2e-cpu")["rows"]
    ]
    return table(("workload", "generate", "RadixKV", "times faster", "equal answers"), rows)


def against_vllm(title: str, documents: Mapping[str, str], form: str = "{:.2f}", factor: float = 1) -> str:
    """One table of several results, each under a heading of its own.

    Args:
        title: of the first column; "workload": the last row is the time to the first answer.
        form: of the seconds times ``factor``.
    """
    found = [results(name) for name in documents.values()]
    by_name = [{row["name"]: row for row in document["rows"]} for document in found]
    rows = [
        (name, *(figure for rows in by_name for figure in _against_vllm(rows[name], form, factor)))
        for name in by_name[0]
    ]
    if title == "workload":
        ready = [(document["ready"]["ours"], document["ready"]["theirs"]) for document in found]
        figures = (f for ours, theirs in ready for f in (f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"))
        rows.append(("process start to first answer", *figures))
    header = (word for heading in documents for word in (f"{heading}: RadixKV", "vLLM", "ratio"))
    return table((title, *header), rows)


def _against_vllm(row: Any, form: str, factor: float) -> Iterable[str]:
    ours, theirs = (form.format(factor * statistics.median(row[engine])) for engine in ("ours", "theirs"))
    return ours, theirs, f"{row['ratio']:.2f}"


def bfloat16_against_vllm() -> str:
    return against_vllm("workload", {"Intel": "against-vllm-bf16", "AMD": "against-vllm-bf16-amd"})


def float32_against_vllm() -> str:
    return against_vllm("workload", {"Intel": "against-vllm-f32", "AMD": "against-vllm-f32-amd"})


def against_vllm_on_older_processors() -> str:
    documents = {
        "Zen 4, bfloat16": "against-vllm-bf16-zen4",
        "Zen 4, float32": "against-vllm-f32-zen4",
        "Ice Lake, float32": "against-vllm-f32-icelake",
    }
    return against_vllm("workload", documents)


def float32_against_vllm_with_avx2() -> str:
    return against_vllm("workload", {"Zen 3, float32": "against-vllm-f32-zen3"})


def requests_against_vllm() -> str:
    documents = {
        "Intel": "against-vllm-requests",
        "AMD": "against-vllm-requests-amd",
        "Zen 4": "against-vllm-requests-zen4",
    }
    return against_vllm("requests, bfloat16", documents)


def experts_against_vllm() -> str:
    documents = {"Intel": "against-vllm-experts", "AMD": "against-vllm-experts-amd"}
    return against_vllm("mixture of experts", documents)


def steps_against_vllm() -> str:
    documents = {
        "Intel": "steps-vllm",
        "AMD": "steps-vllm-amd",
        "Zen 4": "steps-vllm-zen4",
        "Zen 3": "steps-vllm-zen3",
    }
    return against_vllm("milliseconds of a step", documents, "{:.1f}", 1000)


def against_llama_cpp() -> str:
    rows = [
        (
            row["name"],
            processor,
            dtype,
            f"{statistics.median(row['ours']):.2f}",
            f"{statistics.median(row['theirs']):.2f}",
            f"{row['ratio']:.2f}",
        )
        for processor, suffix, dtypes in (
            ("Intel", "", ("bfloat16", "float32")),
            ("AMD", "-amd", ("bfloat16", "float32")),
            ("Zen 3", "-zen3", ("float32",)),
        )
        for dtype in dtypes
        for row in results(f"against-llama-cpp-{dtype}-int4{suffix}")["rows"]
    ]
    return table(("workload", "processor", "our activations", "RadixKV, int4", "llama.cpp, Q4_1", "ratio"), rows)


def fairness() -> str:
    document = results("fairness-cpu")
    rows = [
        (
            f"{loop}: {name}",
            f"{statistics.median(p99(run['steps_to_first_token']) for run in runs):.1f}",
            f"{statistics.median(p99(run['seconds_to_first_token']) for run in runs):.2f}",
            f"{statistics.median(run['num_tokens'] / run['seconds'] for run in runs):,.0f}",
            f"{statistics.median(run['hit_rate'] for run in runs):.1%}",
        )
        for loop, measured in (("closed", document), ("open", document["open_loop"]))
        for name, runs in measured["runs"].items()
    ]
    header = (
        "",
        "modest tenants' p99 to the first token, steps",
        "seconds",
        "tokens per second",
        "prompt tokens reused",
    )
    return table(header, rows)


def attacks() -> str:
    def columns(then: Any, now: Any) -> Iterable[str]:
        for figure in ("first_token", "gap", "health"):
            yield from (f"{cost[figure]:.2f}" for cost in (then, now))

    costs = results("attacks-cpu")["costs"]
    rows = [
        (then["attack"], *columns(then, now))
        for then, now in zip(costs["the other version"], costs["this version"], strict=True)
    ]
    header = [f"{what}, {when}" for what in ("first token", "token gap", "/health") for when in ("before", "now")]
    return table(("", *header), rows)


def cluster() -> str:
    def median(runs: Any, figure: Callable[[Any], float]) -> float:
        return statistics.median(figure(run) for run in runs)

    rows = [
        (
            name,
            f"{median(runs, lambda run: run['time_to_first_token']['median_ms']) / 1e3:.2f}",
            f"{median(runs, lambda run: 1e3 / run['output_tokens_per_s']):.2f}",
            f"{median(runs, lambda run: run['output_tokens_per_s']):.1f}",
        )
        for name, runs in results("cluster-cpu")["costs"].items()
    ]
    return table(("32 streams", "first token, s", "ms per token, of all streams", "tokens per second"), rows)


def microseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


# What each row says, and the benches of its figures.
_BOOKKEEPING = {
    "look up a known prompt of 4k / 32k / 128k tokens": ("match_hit_4k", "match_hit_32k", "match_hit_128k"),
    "look up 32k tokens down a path of 64 nodes": ("match_chain64_32k",),
    "admit a known prompt of 32k tokens from a Python list": ("admit_hit_32k_list",),
    "publish a new prompt of 4k / 32k / 128k tokens": ("insert_cold_4k", "insert_cold_32k", "insert_cold_128k"),
    "evict a leaf of 10 thousand / 100 thousand / 1 million": ("evict_1_of_10k", "evict_1_of_100k", "evict_1_of_1m"),
    "allocate for a step of 256 decoding sequences": ("decode_step_256",),
    "record a step of 256 decoding sequences": ("decode_record_256",),
    "fork 16 ways from a prompt of 4k tokens": ("fork_16_of_4k",),
    "one step of 4 beams over a prompt of 32k tokens": ("beam_step_4_of_32k",),
    "close a sequence of 32k tokens": ("release_32k",),
}


def bookkeeping() -> str:
    by_name = {row["name"]: row for row in results("cache")["rows"]}

    def cell(names: Iterable[str], key: str) -> str:
        return " / ".join(microseconds(by_name[name][key]) for name in names if key in by_name[name])

    rows = [(work, cell(n, "median_us"), cell(n, "hash_chain_median_us")) for work, n in _BOOKKEEPING.items()]
    return table(("work", "RadixKV", "chain of hashes"), rows)


def eviction() -> str:
    trace = results("policies")[0]
    names = {
        **{name: name for name in ("lru", "lfu", "segmented-lru", "priority", "cost-aware", "adaptive")},
        "LRU by blocks": "LRU over single blocks",
        "Belady's bound": "Belady's bound (knows the future)",
    }
    rows = [(shown, *(f"{rate:.3f}" for rate in trace["rates"][name])) for name, shown in names.items()]
    unlimited = [f"{trace['unlimited']:.3f}"] * len(trace["num_blocks"])
    sizes = [f"{blocks / trace['num_distinct_blocks']:.0%}".replace("%", " %") for blocks in trace["num_blocks"]]
    return table(("policy", *sizes), [*rows, ("unlimited", *unlimited)])


def planning() -> str:
    rows = results("plan")["rows"]
    changes = list(dict.fromkeys(row["change"] for row in rows))
    medians = {(row["shared"], row["change"]): f"{row['median_us']:,.0f}" for row in rows}
    shared = dict.fromkeys(row["shared"] for row in rows)
    return table(("256 sequences share", *changes), [(s, *(medians[s, change] for change in changes)) for s in shared])


def routers() -> str:
    rows = [
        (
            f"{row['num_replicas']}",
            row["router"],
            f"{row['hit_rate']:.3f}",
            f"{row['p50']:.0f}",
            f"{row['p99']:,.0f}",
            f"{row['imbalance']:.2f}",
            f"{row['least_imbalance']:.2f}",
        )
        for row in results("replicas")["rows"]
    ]
    return table(("replicas", "router", "hit rate", "p50, s", "p99, s", "imbalance", "least"), rows)


def drafts() -> str:
    document = results("drafts-cpu")
    peers = list(dict.fromkeys(name for row in document["rows"] for name in row["peers"]))
    rows = [
        (
            row["name"],
            f"{statistics.median(row['without']):.1f}",
            f"{statistics.median(row['with_drafts']):.1f}",
            f"{row['ratio']:.2f}",
            "" if row["wanted"] is None else f"{row['wanted']:.2f}",
            *(f"{row['peers'][name]:.1f}" if name in row["peers"] else "" for name in peers),
            f"{row['repeated_share']:.0%}".replace("%", " %"),
        )
        for row in document["rows"]
    ]
    return table(("tokens a second", "without", "with drafts", "times", "wanted", *peers, "in repeats"), rows)


def after_a_restart() -> str:
    rows = [
        (
            f"{row['prompt_tokens']:,} tokens" + (f", {row['question_tokens']} new" if row["question_tokens"] else ""),
            f"{row['hot']:.3f}",
            f"{row['loaded']:.3f}",
            f"{row['cold']:.3f}",
            f"{row['loaded'] / row['hot']:.2f}",
            f"{row['loaded'] / row['cold']:.3f}",
        )
        for row in results("tiers-cpu")["restart"]
    ]
    return table(("prompt", "hot", "loaded after a restart", "cold", "loaded / hot", "loaded / cold"), rows)


def working_set() -> str:
    sets = results("tiers-cpu")["working_set"]["rows"]
    rows = [
        (
            row["tier"],
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens_per_second'] / sets[0]['tokens_per_second']:.2f}",
            f"{row['cached_share']:.1%}".replace("%", " %"),
            f"{row['ttft_p50']:.2f}",
            f"{row['ttft_p99']:.2f}",
        )
        for row in sets
    ]
    return table(("below the pool", "tokens a second", "times", "reused", "first token p50, s", "p99, s"), rows)


def arrivals() -> str:
    rows = [
        (
            row["tier"],
            f"{row['cached_share']:.1%}".replace("%", " %"),
            f"{row['ttft_p50']:.2f}",
            f"{row['ttft_p99']:.2f}",
        )
        for row in results("tiers-cpu")["arrivals"]
    ]
    return table(("below the pool", "reused", "first token p50, s", "p99, s"), rows)


def reserved_memory() -> str:
    rows = []
    for lengths, reserved in (((800, 2300, 3900), 4096), ((600, 900, 1300, 1700), 2048)):
        used, slots = sum(lengths), reserved * len(lengths)
        held = sum(-(-length // 16) * 16 for length in lengths)
        *others, last = (f"{length:,}" for length in lengths)
        rows.append(
            (
                f"{', '.join(others)} and {last} tokens, {reserved:,} reserved each",
                f"{slots:,} → {held:,}",
                f"{100 * (1 - used / slots):.1f} % → {100 * (1 - used / held):.1f} %",
            )
        )
    return table(("requests of", "slots reserved → held", "wasted"), rows)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (README, end_to_end),
        (README, bfloat16_against_vllm),
        (CPU, bfloat16_against_vllm),
        (CPU, float32_against_vllm),
        (CPU, against_vllm_on_older_processors),
        (CPU, float32_against_vllm_with_avx2),
        (CPU, requests_against_vllm),
        (CPU, experts_against_vllm),
        (CPU, steps_against_vllm),
        (CPU, against_llama_cpp),
        (MEASURED_SERVER, fairness),
        (MEASURED_SERVER, attacks),
        (BENCHMARKS, end_to_end),
        (BENCHMARKS, bookkeeping),
        (BENCHMARKS, eviction),
        (BENCHMARKS, planning),
        (BENCHMARKS, routers),
        (MEASURED_CLUSTER, cluster),
        (BENCHMARKS, reserved_memory),
        (MEASURED_DRAFTS, drafts),
        (MEASURED_TIERS, after_a_restart),
        (MEASURED_TIERS, working_set),
        (MEASURED_TIERS, arrivals),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else value.__name__,
)
def test_a_table_is_what_was_measured(path: Path, expected: Callable[[], str]) -> None:
    assert expected() in path.read_text(), f"{path.relative_to(ROOT)} should have\n\n{expected()}"
