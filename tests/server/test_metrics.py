"""The metrics match the requests that were made."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
from support.server_process import ServerProcess

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana_dashboard.json"


def test_metrics_count_what_happened(server: ServerProcess, http: httpx.Client) -> None:
    before = server.metrics()

    def change(name: str) -> float:
        return server.metrics()[name] - before.get(name, 0)

    body = {"prompt": "Tell me of the sea, and of ships. " * 10, "max_tokens": 9, "ignore_eos": True}
    usages = [http.post("/v1/completions", json={**body, "n": n}).json()["usage"] for n in (1, 4)]
    num_prompt = usages[0]["prompt_tokens"]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached == [0, num_prompt - 1]
    assert change("radixkv:prefix_cache_queries_total") == 2 * num_prompt
    assert change("radixkv:prefix_cache_hits_total") == num_prompt - 1
    assert change("radixkv:prompt_tokens_computed_total") == num_prompt + 1
    assert change("radixkv:prompt_tokens_total") == 2 * num_prompt
    assert change("radixkv:generation_tokens_total") == 9 + 4 * 9
    assert change('radixkv:request_success_total{finished_reason="length"}') == 5
    assert change("radixkv:forked_sequences_total") == 3
    assert change("radixkv:copied_blocks_total") > 0
    assert change("radixkv:time_to_first_token_seconds_count") == 2
    assert change("radixkv:e2e_request_latency_seconds_count") == 2
    assert 8 <= change("radixkv:inter_token_latency_seconds_count") <= 16
    assert change("radixkv:num_steps_total") == change("radixkv:iteration_tokens_count") == 18
    assert change("radixkv:iteration_tokens_sum") == (num_prompt + 8) + (1 + 4 * 8)
    assert change("radixkv:iteration_sequences_sum") == 9 + (1 + 4 * 8)
    after = server.metrics()
    states = {state: after[f'radixkv:kv_cache_blocks{{state="{state}"}}'] for state in ("free", "held", "evictable")}
    assert sum(states.values()) == 2000
    assert states["held"] == after["radixkv:kv_cache_usage_perc"] == 0
    assert after["radixkv:num_requests_running"] == after["radixkv:num_requests_waiting"] == 0
    assert change("radixkv:num_preemptions_total") == change("radixkv:evicted_blocks_total") == 0
    # Of a search's beams, only those that are returned count.
    http.post("/v1/completions", json={**body, "use_beam_search": True, "n": 2, "beam_width": 4}).raise_for_status()
    assert change('radixkv:request_success_total{finished_reason="length"}') == 7
    assert change("radixkv:e2e_request_latency_seconds_count") == 3


def test_the_dashboard_queries_metrics_that_exist(server: ServerProcess) -> None:
    found = {name.partition("{")[0] for name in server.metrics()}
    expressions = [
        target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel.get("targets", [])
    ]
    assert len(expressions) >= 10
    for expression in expressions:
        words = expression.replace("{", " ").replace("[", " ").replace("(", " ").replace(")", " ").split()
        names = [word for word in words if word.startswith("radixkv:")]
        assert names
        assert set(names) <= found
