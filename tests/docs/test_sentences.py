"""Figures within sentences are those of the benches' JSON files, to the last digit."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from support.committed_figures import (
    BENCHMARKS,
    CLUSTER,
    CPU,
    DRAFTS,
    INDEX,
    MEASURED_CLUSTER,
    MEASURED_DRAFTS,
    MEASURED_GPU,
    MEASURED_SERVER,
    MEASURED_TIERS,
    README,
    TIERS,
    gpu_rows,
    results,
)

from radixkv.bench.common.percentiles import p99


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
    p99_wait = p99(attacked["waits"])
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
    requests = [row["ratio"] for row in results("against-vllm-requests-zen3")["rows"]]
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
        (MEASURED_SERVER, f"ended with {attacked['answered']} normal answers"),
        (MEASURED_SERVER, f"at most {p99_wait:.2f} s of the server's processor time"),
        (MEASURED_SERVER, f"{p99_wait / attacked['full_step']:.1f} times a step"),
        (MEASURED_SERVER, f"a health check at most {max(attacked['stalls']):.2f} s"),
        (MEASURED_SERVER, f"{second:,.0f} MB in the second quarter"),
        (MEASURED_SERVER, f"{last:,.0f} MB in the last"),
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
        (MEASURED_GPU, f"{flat / together:.1f} times as many tokens a second"),
        (MEASURED_GPU, f"take {answers[1]['seconds'] / answers[0]['seconds']:.2f} of the time".replace(" 0.", " .")),
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
        (CPU, f"ratios were {min(requests):.2f} to {max(requests):.2f}"),
        (MEASURED_TIERS, f"comes after {shared['loaded']:.3f} s, and cold after {shared['cold']:.3f} s"),
    ]


@pytest.mark.parametrize(("path", "figure"), _sentences(), ids=lambda value: getattr(value, "name", value))
def test_a_sentence_says_what_was_measured(path: Path, figure: str) -> None:
    assert figure in " ".join(path.read_text().split())


def test_what_was_soaked_did_not_fail() -> None:
    assert results("soak")["failures"] == results("soak-server")["failures"] == []
