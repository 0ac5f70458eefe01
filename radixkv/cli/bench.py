"""`radixkv bench`: every measurement is a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from radixkv.cli import gpu_bench
from radixkv.cli.consoles import console_for
from radixkv.cli.exits import exit_unless
from radixkv.cli.options import JsonPath, Model, is_given
from radixkv.cli.output_paths import given_path, writable_plot
from radixkv.extras import needing_extra

app = typer.Typer(no_args_is_help=True, help="Measure, always against a baseline in the same run.")
app.add_typer(gpu_bench.app)

PeerPython = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="Python of an environment in which the baseline is installed"),
]
PlotPath = Annotated[
    Path | None,
    typer.Option(parser=given_path, metavar="<path>", callback=writable_plot, help="draw the figures into this file"),
]
Rounds = Annotated[int, typer.Option(min=1, help="rounds; the median is reported")]
RoundsInTurns = Annotated[int, typer.Option(min=1, help="rounds, alternating; the median is reported")]
OnlyWorkloads = Annotated[str | None, typer.Option(help="only workloads whose name contains this")]
AttackSeed = Annotated[int, typer.Option(help="seed of the attackers' choices")]


@app.command()
def e2e(json_path: JsonPath = None, rounds: Rounds = 3, only: OnlyWorkloads = None) -> None:
    """End to end against transformers' generate."""
    from radixkv.bench.engine.e2e import run_e2e

    run_e2e(console_for(json_path), rounds, only, json_path)


@app.command()
def against(
    vllm: PeerPython = None,
    llama_cpp: PeerPython = None,
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option(help="type of both engines; llama.cpp uses that of its file")
    ] = "bfloat16",
    quantization: Annotated[
        Literal["int8", "int4"] | None, typer.Option(help="quantization of RadixKV's weights")
    ] = None,
    json_path: JsonPath = None,
    plot: PlotPath = None,
    rounds: RoundsInTurns = 3,
    only: OnlyWorkloads = None,
    kind: Annotated[
        Literal["end-to-end", "requests", "experts", "steps"],
        typer.Option(
            help="requests: sampling, schemas and other lengths; experts: a mixture with random weights; "
            "steps: a tiny model's on one core"
        ),
    ] = "end-to-end",
) -> None:
    """End to end against vLLM or llama.cpp on this processor."""
    from radixkv.bench.peers.against import run_against

    peer_python = vllm or llama_cpp
    if peer_python is None or (vllm and llama_cpp):
        raise typer.BadParameter("expected one of --vllm and --llama-cpp")
    if llama_cpp and kind != "end-to-end":
        raise typer.BadParameter(f"--kind {kind}: expected --vllm, whose API has what it takes")
    peer: Literal["vllm", "llama.cpp"] = "vllm" if vllm else "llama.cpp"
    run_against(
        console_for(json_path, plot),
        peer=peer,
        peer_python=peer_python,
        kind=kind,
        dtype=dtype,
        quantization=quantization,
        rounds=rounds,
        only=only,
        json_path=json_path,
        plot_path=plot,
    )


@app.command()
def drafts(
    json_path: JsonPath = None,
    plot: PlotPath = None,
    rounds: RoundsInTurns = 1,
    only: Annotated[
        list[str] | None, typer.Option(help="only workloads whose name contains this; may be repeated")
    ] = None,
    dtype: Annotated[str, typer.Option(help="type of the model; float32 compares the tokens")] = "auto",
    num_tokens: Annotated[
        int, typer.Option(min=2, help="maximum number of tokens per answer, unless a schema needs more")
    ] = 64,
    vllm: PeerPython = None,
) -> None:
    """Tokens per second with drafts and without, and whether the tokens are equal."""
    from radixkv.bench.drafts.speed import run_drafts

    run_drafts(
        console_for(json_path, plot),
        rounds=rounds,
        only=only or [],
        dtype=dtype,
        num_tokens=num_tokens,
        json_path=json_path,
        plot_path=plot,
        vllm=vllm,
    )


@app.command()
def cache(json_path: JsonPath = None, rounds: Rounds = 15) -> None:
    """Cost of the cache's bookkeeping, against a chain of block hashes."""
    from radixkv.bench.cache.bookkeeping import run_cache

    run_cache(console_for(json_path), rounds, json_path)


@app.command()
def cache_scaling(json_path: JsonPath = None, plot: PlotPath = None) -> None:
    """How the cost of the cache's bookkeeping grows with the sizes of prompts and trees."""
    from radixkv.bench.cache.scaling import run_scaling

    run_scaling(console_for(json_path, plot), json_path, plot)


@app.command()
def routing(
    decisions: Annotated[int, typer.Option(min=1, help="number of decisions to measure")] = 5000,
    json_path: JsonPath = None,
) -> None:
    """Time to choose one of 16 replicas for a prompt, with a million blocks indexed."""
    from radixkv.bench.cluster.routing import run_routing

    run_routing(console_for(json_path), decisions, json_path)


@app.command()
def tier_reads(
    folder: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="folder on the disk to measure [default: temporary files]"),
    ] = None,
    rounds: RoundsInTurns = 5,
    json_path: JsonPath = None,
) -> None:
    """Read and write rates of the disk tier, against a plain loop over the same file and memcpy."""
    from radixkv.bench.tiers.reads import run_tier_reads

    run_tier_reads(console_for(json_path), folder, rounds, json_path)


@app.command()
def quality(json_path: JsonPath = None) -> None:
    """Loss of quality in bfloat16, int8 and int4 on a CPU: perplexity, and greedy tokens that change."""
    from radixkv.bench.engine.quality import run_quality

    run_quality(console_for(json_path), json_path)


@app.command()
def check() -> None:
    """Run the fast benches, and report what became slower than the committed figures by more than the noise."""
    from radixkv.bench.check import run_check

    exit_unless(run_check(console_for()))


@app.command()
def soak(
    minutes: Annotated[float, typer.Option(min=0.01, help="duration")] = 5,
    seed: Annotated[int, typer.Option(help="seed of the operations")] = 0,
    json_path: JsonPath = None,
) -> None:
    """Random operations on the cache, with every rule checked."""
    from radixkv.bench.cache.soak import run_soak

    exit_unless(run_soak(console_for(json_path), minutes, seed, json_path))


@app.command()
def soak_server(
    minutes: Annotated[float, typer.Option(min=0.05, help="duration")] = 10,
    seed: AttackSeed = 0,
    json_path: JsonPath = None,
) -> None:
    """Hostile clients beside normal ones on a real server, for a long time."""
    with needing_extra("bench,server"):
        from radixkv.bench.serving.soak import run_soak_server

    exit_unless(run_soak_server(console_for(json_path), minutes, seed, json_path))


@app.command()
def attacks(
    seconds: Annotated[float, typer.Option(min=0.1, help="duration of each attack")] = 4.0,
    seed: AttackSeed = 0,
    checkout: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="folder of another version to attack as well")
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """How each attack on a server slows other clients: first tokens, gaps between tokens, health checks."""
    with needing_extra("bench,server"):
        from radixkv.bench.serving.attacks import run_attacks

    run_attacks(console_for(json_path), seconds, seed, checkout, json_path)


@app.command()
def serve(
    context: typer.Context,
    url: Annotated[str, typer.Option(help="an OpenAI-compatible server")] = "http://127.0.0.1:8000",
    json_path: JsonPath = None,
    plot: PlotPath = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Poisson arrivals: conversations per second")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="without --rate: concurrent conversations")] = 16,
    conversations: Annotated[int, typer.Option(min=1, help="conversations in all")] = 64,
    turns: Annotated[int, typer.Option(min=1, help="turns per conversation")] = 1,
    prefixes: Annotated[int, typer.Option(min=1, help="different system prompts")] = 1,
    prefix_tokens: Annotated[int, typer.Option(min=0, help="length of a system prompt; 0: none")] = 500,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="length of a question")] = 50,
    answer_tokens: Annotated[int, typer.Option(min=1, help="length of an answer")] = 64,
    ignore_eos: Annotated[
        bool, typer.Option(help="set ignore_eos, so that answers have full length; not all servers accept it")
    ] = True,
    model: Annotated[str | None, typer.Option(help="the model's name [default: the first that is served]")] = None,
    api_key: Annotated[str | None, typer.Option(help="key that requests send, if the server has keys")] = None,
    seed: Annotated[
        int, typer.Option(help="seed of the words; use a new one for each run, because servers cache earlier prompts")
    ] = 0,
) -> None:
    """Load test of a server: median and p99 latencies, throughput, cached tokens."""
    with needing_extra("bench"):
        from radixkv.bench.serving.client import HttpClient
        from radixkv.bench.serving.load_test import Arrivals, run_serve
        from radixkv.bench.serving.workload import LoadShape

    if rate is not None and is_given(context, "concurrency"):
        raise ValueError(
            "--concurrency: not together with --rate, which begins conversations however many are in progress"
        )
    shape = LoadShape(conversations, turns, prefixes, prefix_tokens, prompt_tokens, answer_tokens, seed)
    client = HttpClient(url, model, api_key, ignore_eos)
    arrivals = Arrivals(rate, concurrency)
    exit_unless(run_serve(console_for(json_path, plot), client, url, shape, arrivals, json_path, plot))


@app.command()
def fairness(
    model: Model = None,
    rounds: RoundsInTurns = 3,
    json_path: JsonPath = None,
    plot: PlotPath = None,
) -> None:
    """One greedy tenant beside three modest ones: times to the first token, throughput, cached tokens."""
    from radixkv.bench.engine.fairness import run_fairness

    run_fairness(console_for(json_path, plot), model, rounds, json_path, plot)


@app.command()
def http_cost(
    model: Model = None,
    streams: Annotated[int, typer.Option(min=1, help="concurrent streams")] = 64,
    answer_tokens: Annotated[int, typer.Option(min=2, help="length of an answer")] = 64,
    rounds: Rounds = 3,
    json_path: JsonPath = None,
) -> None:
    """Cost of HTTP, against the same load on the engine in the same run."""
    with needing_extra("bench,server"):
        from radixkv.bench.serving.http_cost import run_http_cost

    run_http_cost(console_for(json_path), model, streams, answer_tokens, rounds, json_path)


@app.command()
def tiers(
    model: Model = None,
    conversations: Annotated[
        int, typer.Option(min=32, help="number of conversations, whose working set is four times the pool")
    ] = 48,
    turns: Annotated[int, typer.Option(min=1, help="turns per conversation")] = 5,
    rounds: RoundsInTurns = 3,
    shared_cache: Annotated[
        str | None,
        typer.Option(help="also measure this shared store: a folder, or the URL of a Redis or Valkey server"),
    ] = None,
    json_path: JsonPath = None,
    plot: PlotPath = None,
) -> None:
    """Gain and cost of tiers below the pool: restarts, a working set larger than the pool, writes, a shared store."""
    from radixkv.bench.tiers.benefit import run_tiers

    run_tiers(
        console_for(json_path, plot),
        model,
        conversations=conversations,
        turns=turns,
        rounds=rounds,
        shared_cache=shared_cache,
        json_path=json_path,
        plot_path=plot,
    )


@app.command("cluster")
def cluster_bench(
    model: Model = None,
    replicas: Annotated[
        list[int] | None,
        typer.Option(min=2, help="number of replicas of the larger cluster; may be repeated", show_default="2"),
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="concurrent streams")] = 32,
    rounds: RoundsInTurns = 3,
    json_path: JsonPath = None,
) -> None:
    """Cost of an ingress over replicas against one server, and their hit rate."""
    with needing_extra("cluster"):
        from radixkv.bench.cluster.ingress import run_cluster_bench

    run_cluster_bench(console_for(json_path), model, replicas or [2], streams, rounds, json_path)


@app.command()
def replica_memory(
    model: Model = None,
    replicas: Annotated[int, typer.Option(min=2, help="number of replicas")] = 2,
    json_path: JsonPath = None,
) -> None:
    """Memory of each of several replicas on a machine, with private and with shared weights."""
    with needing_extra("cluster"):
        from radixkv.bench.cluster.replica_memory import run_replica_memory

    run_replica_memory(console_for(json_path), model, replicas, json_path)


@app.command()
def chaos(
    model: Model = None,
    replicas: Annotated[int, typer.Option(min=2, help="replicas")] = 2,
    streams: Annotated[int, typer.Option(min=1, help="requests in all")] = 200,
    concurrency: Annotated[int, typer.Option(min=1, help="concurrent requests")] = 16,
    seconds: Annotated[float, typer.Option(min=0.1, help="average time between kills")] = 4.0,
    answer_tokens: Annotated[int, typer.Option(min=32, help="maximum length of an answer")] = 48,
    seed: Annotated[int, typer.Option(help="seed of the kills")] = 0,
    json_path: JsonPath = None,
) -> None:
    """Kill replicas while they answer, and the ingress once: every stream must complete with its text."""
    with needing_extra("cluster"):
        from radixkv.bench.cluster.chaos import run_chaos

    succeeded = run_chaos(
        console_for(json_path),
        model,
        num_replicas=replicas,
        streams=streams,
        concurrency=concurrency,
        seconds_between_kills=seconds,
        answer_tokens=answer_tokens,
        seed=seed,
        json_path=json_path,
    )
    exit_unless(succeeded)
