"""Figures in README and documentation are those of the benches' JSON files, to the last digit."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "radixkv" / "bench" / "results"
BENCHMARKS = ROOT / "docs" / "benchmarks" / "index.md"
CPU = ROOT / "docs" / "benchmarks" / "cpu.md"
README = ROOT / "README.md"
INDEX = ROOT / "docs" / "index.md"
OPERATE = ROOT / "docs" / "operate.md"
CLUSTER = ROOT / "docs" / "cluster.md"
GPU = ROOT / "docs" / "gpu.md"
DRAFTS = ROOT / "docs" / "drafts.md"
TIERS = ROOT / "docs" / "tiers.md"
MEASURED_CLUSTER = ROOT / "docs" / "benchmarks" / "cluster.md"
MEASURED_DRAFTS = ROOT / "docs" / "benchmarks" / "drafts.md"
MEASURED_TIERS = ROOT / "docs" / "benchmarks" / "tiers.md"


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; what follows the first column is aligned to the right."""
    header = list(header)
    lines = [f"| {' | '.join(line)} |" for line in (header, *rows)]
    return "\n".join([lines[0], f"|---|{'---:|' * (len(header) - 1)}", *lines[1:]])


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


def against_vllm(**documents: str) -> str:
    """One table of several results, each under a name of its own."""
    found = {heading: results(f"against-vllm-{name}") for heading, name in documents.items()}
    names = [row["name"] for row in next(iter(found.values()))["rows"]]
    rows = [
        (
            name,
            *(
                figure
                for document in found.values()
                for row in document["rows"]
                if row["name"] == name
                for figure in (
                    f"{statistics.median(row['ours']):.2f}",
                    f"{statistics.median(row['theirs']):.2f}",
                    f"{row['ratio']:.2f}",
                )
            ),
        )
        for name in names
    ]
    ready = [(document["ready"]["ours"], document["ready"]["theirs"]) for document in found.values()]
    figures = (figure for ours, theirs in ready for figure in (f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"))
    rows.append(("process start to first answer", *figures))
    return table(("workload", *(word for name in found for word in (f"{name}: RadixKV", "vLLM", "ratio"))), rows)


def bfloat16_against_vllm() -> str:
    return against_vllm(Intel="bf16", AMD="bf16-amd")


def float32_against_vllm() -> str:
    return against_vllm(Intel="f32", AMD="f32-amd")


def against_vllm_on_zen_4() -> str:
    return against_vllm(bfloat16="bf16-zen4", float32="f32-zen4")


def float32_against_vllm_without_amx() -> str:
    return against_vllm_on_one_processor("against-vllm-f32-icelake", "Intel without AMX, float32", "{:.2f}")


def requests_against_vllm() -> str:
    return against_vllm_on_one_processor("against-vllm-requests-amd", "requests on the EPYC, bfloat16", "{:.2f}")


def requests_against_vllm_on_intel() -> str:
    return against_vllm_on_one_processor("against-vllm-requests", "requests on the Intel Xeon, bfloat16", "{:.2f}")


def requests_against_vllm_on_zen_4() -> str:
    return against_vllm_on_one_processor(
        "against-vllm-requests-zen4", "requests on the EPYC (Zen 4), bfloat16", "{:.2f}"
    )


def experts_against_vllm() -> str:
    return against_vllm_on_one_processor("against-vllm-experts-amd", "mixture of experts", "{:.2f}")


def steps_against_vllm() -> str:
    return against_vllm_on_one_processor("steps-vllm-amd", "milliseconds of a step", "{:.1f}", 1000)


def steps_against_vllm_on_intel() -> str:
    return against_vllm_on_one_processor("steps-vllm", "milliseconds of a step, Intel", "{:.1f}", 1000)


def against_vllm_on_one_processor(name: str, title: str, form: str, factor: float = 1) -> str:
    """
    Args:
        factor: of the seconds.
    """
    rows = [
        (
            row["name"],
            *(form.format(factor * statistics.median(row[engine])) for engine in ("ours", "theirs")),
            f"{row['ratio']:.2f}",
        )
        for row in results(name)["rows"]
    ]
    return table((title, "RadixKV", "vLLM", "ratio"), rows)


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
        for processor, suffix in (("Intel", ""), ("AMD", "-amd"))
        for dtype in ("bfloat16", "float32")
        for row in results(f"against-llama-cpp-{dtype}-int4{suffix}")["rows"]
    ]
    return table(("workload", "processor", "our activations", "RadixKV, int4", "llama.cpp, Q4_1", "ratio"), rows)


def fairness() -> str:
    def p99(run: Any) -> float:
        return float(np.percentile(run["seconds_to_first_token"], 99))

    document = results("fairness-cpu")
    rows = [
        (
            f"{loop}: {name}",
            f"{statistics.median(np.percentile(run['steps_to_first_token'], 99) for run in runs):.1f}",
            f"{statistics.median(p99(run) for run in runs):.2f}",
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


GPUS = ("h200", "h100")
# Rows that multiply; what they read is nothing beside it.
MULTIPLIED = ("prefill", "the same, torch's sdpa")


def gpu_rows(gpu: str) -> dict[str, dict[str, Any]]:
    """Rows of all parts of a first light, each with the limits that its part measured."""
    reports = (part.get("report", {}) for part in results(f"first-light-{gpu}")["parts"].values())
    return {row["name"]: row | report["limits"] for report in reports for row in report.get("rows", ())}


def gpu_layer() -> str:
    measured = [gpu_rows(gpu) for gpu in GPUS]
    rows = [
        (
            name,
            f"{row['bytes'] / 1e6:,.0f}",
            *(
                figure
                for each in measured
                for figure in (
                    f"{each[name]['median_us']:,.0f}",
                    f"{each[name]['bytes'] / each[name]['median_us'] * 1e6 / each[name]['read_bytes_per_s']:.2f}",
                )
            ),
        )
        for name, row in measured[0].items()
        if "ratio" in row and not name.startswith(MULTIPLIED)
    ]
    return table(("one layer", "MB", "H200, us", "of reading", "H100, us", "of reading"), rows)


def gpu_prompts() -> str:
    measured = [gpu_rows(gpu) for gpu in GPUS]
    rows = [
        (
            name,
            *(
                figure
                for each in measured
                for figure in (f"{each[name]['median_us']:,.0f}", f"{each[name]['ratio']:.2f}")
            ),
        )
        for name in measured[0]
        if name.startswith(MULTIPLIED)
    ]
    return table(("one layer", "H200, us", "of a product", "H100, us", "of a product"), rows)


def gpu_steps() -> str:
    rows = []
    for gpu in GPUS:
        for shared, name in ((0, "nothing"), (3500, "3,500 tokens")):
            prefix = f"default: 64 x 4,096, {shared:,} shared"
            step, drawn, answers = (gpu_rows(gpu)[f"{prefix}, {what}"] for what in ("step", "top-p step", "answers"))
            floor_us = step["bytes"] / step["read_bytes_per_s"] * 1e6
            rows.append(
                (
                    f"{gpu.upper()}: {name}",
                    f"{step['bytes'] / 1e9:.1f}",
                    f"{floor_us / 1e3:.1f}",
                    f"{step['median_us'] / 1e3:.1f}",
                    f"{step['median_us'] / floor_us:.2f}",
                    f"{drawn['median_us'] / 1e3:.1f}",
                    f"{step['tokens_per_s']:,.0f}",
                    f"{answers['seconds']:.1f}",
                )
            )
    header = (
        "64 sequences of 4,096 share",
        "GB",
        "floor, ms",
        "step, ms",
        "step / floor",
        "with top-p, ms",
        "tokens/s",
        "answers, s",
    )
    return table(header, rows)


def gpu_drafts() -> str:
    drafted = [(name, row) for name, row in gpu_rows("h200").items() if name.startswith("drafts: ")]
    rows = [
        (
            name.removeprefix("drafts: 64 x 4,096, 3,500 shared, ").removesuffix(", step"),
            f"{row['median_us'] / 1e3:.1f}",
            f"{row['tokens_per_step']:.1f}",
            f"{row['tokens_per_s']:,.0f}",
        )
        for name, row in drafted
    ]
    return table(("64 sequences of 4,096 that share 3,500", "step, ms", "tokens a step", "tokens/s"), rows)


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
        (CPU, against_vllm_on_zen_4),
        (CPU, float32_against_vllm_without_amx),
        (CPU, requests_against_vllm),
        (CPU, requests_against_vllm_on_intel),
        (CPU, requests_against_vllm_on_zen_4),
        (CPU, experts_against_vllm),
        (CPU, steps_against_vllm),
        (CPU, steps_against_vllm_on_intel),
        (CPU, against_llama_cpp),
        (OPERATE, fairness),
        (OPERATE, attacks),
        (BENCHMARKS, end_to_end),
        (BENCHMARKS, bookkeeping),
        (BENCHMARKS, eviction),
        (BENCHMARKS, planning),
        (BENCHMARKS, routers),
        (MEASURED_CLUSTER, cluster),
        (BENCHMARKS, reserved_memory),
        (GPU, gpu_layer),
        (GPU, gpu_prompts),
        (GPU, gpu_drafts),
        (GPU, gpu_steps),
        (MEASURED_DRAFTS, drafts),
        (MEASURED_TIERS, after_a_restart),
        (MEASURED_TIERS, working_set),
        (MEASURED_TIERS, arrivals),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else value.__name__,
)
def test_a_table_is_what_was_measured(path: Path, expected: Callable[[], str]) -> None:
    assert expected() in path.read_text(), f"{path.relative_to(ROOT)} should have\n\n{expected()}"


def _sentences() -> list[tuple[Path, str]]:
    """Figures within sentences."""
    e2e = {row["name"]: row["ratio"] for row in results("e2e-cpu")["rows"]}
    chats = e2e["16 chats, one 1,000-token system prompt, 64 new"]
    first, alone = e2e["first token, system prompt cached"], e2e["16 unrelated prompts of 240, 64 new"]
    http, soak = results("http-cost"), results("soak")
    http_ms = statistics.median(
        1000 / over_http["output_tokens_per_s"] - 1000 / direct["output_tokens_per_s"]
        for over_http, direct in zip(http["http"], http["direct"], strict=True)
    )
    attacked = results("soak-server")
    p99_wait = sorted(attacked["waits"])[int(0.99 * len(attacked["waits"]))]
    quarter = len(attacked["rss"]) // 4
    second, last = (statistics.median(attacked["rss"][begin:][:quarter]) for begin in (quarter, -quarter))
    trace = results("policies")[0]
    machine = results("e2e-cpu")["machine"]
    tiers = results("tiers-cpu")
    known, writing, shared = tiers["restart"][1], tiers["writing"], tiers["shared"]
    without, _, on_disk, _ = (row["tokens_per_second"] for row in tiers["working_set"]["rows"])
    chaos = results("chaos-cpu")
    from_one, over_ingress = (
        1e3 * statistics.median(each) for each in results("cluster-cpu")["first_tokens_beside_streams"].values()
    )
    routed = {(row["router"], row["num_replicas"]): row for row in results("replicas")["rows"]}
    prefix, least = routed["prefix", 4], [f"{routed['one-cache', count]['least_imbalance']:.2f}" for count in (4, 16)]
    h200, shares = gpu_rows("h200"), ("0", "3,500")
    steps, answers = (
        [h200[f"default: 64 x 4,096, {n} shared, {what}"] for n in shares] for what in ("step", "answers")
    )
    flat, together = (step["median_us"] / 1e3 for step in steps)
    asked, tempered, penalized, reseeded = (f"{row['ratio']:.2f}" for row in results("drafts-f32")["rows"][:4])
    drafted = {row["name"]: f"{row['ratio']:.2f}" for row in results("drafts-cpu")["rows"]}
    written = {way: 1 - writing[f"{way}_ratio"] for way in ("write_back", "write_through")}
    return [
        *((path, f"{chats:.1f} times") for path in (README, INDEX)),
        (INDEX, f"{first:.1f} times as fast"),
        (INDEX, f"{alone:.1f} times as fast"),
        (BENCHMARKS, f"{http_ms:.2f} ms per token"),
        (BENCHMARKS, f"{http['throughput_lost']:.1%}".replace("%", " %")),
        (BENCHMARKS, f"{soak['steps'] / 1e6:.2f} million steps in {soak['minutes']:.0f} minutes"),
        (BENCHMARKS, f"{soak['verifications']:,} verifications"),
        (BENCHMARKS, f"{max(soak['peak_bytes']) / 2**20:.0f} MiB"),
        (BENCHMARKS, f"{trace['num_requests']:,} requests, {trace['num_distinct_blocks']:,} distinct blocks"),
        (BENCHMARKS, f"torch {machine['torch'].partition('+')[0]}, transformers {machine['transformers']}"),
        (README, f"transformers {machine['transformers']}"),
        (README, f"then takes {known['loaded']:.2f} s, and {known['cold']:.2f} s cold"),
        (OPERATE, f"ended with {attacked['answered']} normal answers"),
        (OPERATE, f"at most {p99_wait:.2f} s of the server's processor time"),
        (OPERATE, f"{p99_wait / attacked['full_step']:.1f} times a step"),
        (OPERATE, f"a health check at most {max(attacked['stalls']):.2f} s"),
        (OPERATE, f"{second:,.0f} MB in the second quarter"),
        (OPERATE, f"{last:,.0f} MB in the last"),
        (BENCHMARKS, f"below {least[0]} with 4 replicas and {least[1]} with 16"),
        (CLUSTER, f"the busiest of 4 has {prefix['imbalance']:.2f} times"),
        (CLUSTER, f"assignment of that work is below {prefix['least_imbalance']:.2f}"),
        (MEASURED_CLUSTER, f"after {from_one:.1f} ms from one server and after {over_ingress:.1f} ms over an ingress"),
        *((path, f"{over_ingress - from_one:.1f} ms later") for path in (CLUSTER, MEASURED_CLUSTER)),
        (MEASURED_CLUSTER, f"{chaos['equal']} of {chaos['streams']} were equal"),
        (MEASURED_CLUSTER, f"{chaos['kills']} replicas killed in {chaos['seconds']:.0f} seconds"),
        (MEASURED_CLUSTER, f"the {chaos['ingress_errors']} connections"),
        (MEASURED_CLUSTER, f"knew what replicas hold, after {chaos['seconds_until_known']:.0f} seconds"),
        (MEASURED_DRAFTS, f"was {asked}, {tempered} and {penalized} times as fast, another seed {reseeded} times"),
        (README, f"takes {flat:.1f} ms, and {together:.1f} ms where they share 3,500"),
        (GPU, f"{flat / together:.1f} times as many tokens a second"),
        (GPU, f"take {answers[1]['seconds'] / answers[0]['seconds']:.2f} of the time".replace(" 0.", " .")),
        (README, f"asked again: {results('drafts-cpu')['rows'][0]['ratio']:.1f} times as fast"),
        (MEASURED_TIERS, f"{written['write_back']:.1%} of their tokens a second".replace("%", " %")),
        (MEASURED_TIERS, f"{written['write_through']:.1%} with `write-through`".replace("%", " %")),
        (
            TIERS,
            f"comes after {known['loaded']:.3f} s when they are loaded from a disk, after {known['hot']:.3f} s when",
        ),
        (TIERS, f"after {known['cold']:.3f} s when they are computed"),
        (TIERS, f"are answered {on_disk / without:.2f} times as fast with a disk"),
        (DRAFTS, f"asked again was answered {drafted['asked again, greedy']} times as fast"),
        (DRAFTS, f"a name changed in code {drafted['a name changed in code']} times"),
        (DRAFTS, f"JSON written {drafted['JSON with 12 keys']} times"),
        (MEASURED_TIERS, f"comes after {shared['loaded']:.3f} s, and cold after {shared['cold']:.3f} s"),
    ]


@pytest.mark.parametrize(("path", "figure"), _sentences(), ids=lambda value: getattr(value, "name", value))
def test_a_sentence_says_what_was_measured(path: Path, figure: str) -> None:
    assert figure in " ".join(path.read_text().split())


def test_what_was_soaked_did_not_fail() -> None:
    assert results("soak")["failures"] == results("soak-server")["failures"] == []
