"""`radixkv bench`: every measurement is a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from radixkv.cli.options import JsonPath, Model, is_given
from radixkv.cli.output_paths import writable_plot
from radixkv.cli.report_console import console_for
from radixkv.extras import needing_extra

app = typer.Typer(no_args_is_help=True, help="Measure, always against a baseline in the same run.")

PeerPython = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="python of an environment in which it is installed")
]
PlotPath = Annotated[Path | None, typer.Option(callback=writable_plot, help="draw the figures into this file")]
Rounds = Annotated[int, typer.Option(min=1, help="rounds; the median counts")]
RoundsInTurns = Annotated[int, typer.Option(min=1, help="rounds, in turns; the median counts")]
Only = Annotated[str | None, typer.Option(help="rows whose name contains this")]
OnlyWorkloads = Annotated[str | None, typer.Option(help="workloads whose name contains this")]
Resume = Annotated[bool, typer.Option("--resume", help="keep the rows that the file has, and measure the others")]
AttackSeed = Annotated[int, typer.Option(help="of what the attackers do")]


def _exit_unless(succeeded: bool) -> None:
    if not succeeded:
        raise typer.Exit(1)


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
        Literal["bfloat16", "float32"], typer.Option(help="of both engines; llama.cpp has its file's")
    ] = "bfloat16",
    quantization: Annotated[Literal["int8", "int4"] | None, typer.Option(help="of our weights")] = None,
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
        console_for(json_path, plot), peer, peer_python, kind, dtype, quantization, rounds, only, json_path, plot
    )


@app.command()
def drafts(
    json_path: JsonPath = None,
    plot: PlotPath = None,
    rounds: RoundsInTurns = 1,
    only: Annotated[
        list[str] | None, typer.Option(help="kinds of work whose name contains this; may be repeated")
    ] = None,
    dtype: Annotated[str, typer.Option(help="of the model; float32 to see whether the tokens are the same")] = "auto",
    num_tokens: Annotated[
        int, typer.Option(min=2, help="tokens of an answer at most, where no schema needs more")
    ] = 64,
    vllm: PeerPython = None,
) -> None:
    """Tokens a second with drafts and without, and whether they are the same."""
    from radixkv.bench.drafts.speed import run_drafts

    run_drafts(console_for(json_path, plot), rounds, only or [], dtype, num_tokens, json_path, plot, vllm)


@app.command()
def cache(json_path: JsonPath = None, rounds: Rounds = 15) -> None:
    """What the cache's bookkeeping costs, against a chain of block hashes."""
    from radixkv.bench.cache.bookkeeping import run_cache

    run_cache(console_for(json_path), rounds, json_path)


@app.command()
def cache_scaling(json_path: JsonPath = None, plot: PlotPath = None) -> None:
    """How the costs of the cache's bookkeeping grow with prompts and trees."""
    from radixkv.bench.cache.scaling import run_scaling

    run_scaling(console_for(json_path, plot), json_path, plot)


@app.command()
def attention(json_path: JsonPath = None, only: Only = None, resume: Resume = False) -> None:
    """One layer's attention, cache writes, block copies and draws on a GPU, against what they must cost."""
    from radixkv.bench.gpu.attention import run_attention

    _exit_unless(run_attention(console_for(json_path), json_path, only, resume))


@app.command()
def tiles(json_path: JsonPath = None, only: Only = None, resume: Resume = False) -> None:
    """Which tile configuration is fastest on a GPU, and from when on sharing and splitting pay."""
    from radixkv.bench.gpu.tiles import run_tiles

    _exit_unless(run_tiles(console_for(json_path), json_path, only, resume))


@app.command()
def plan(
    json_path: JsonPath = None,
    steps: Annotated[int, typer.Option(min=1, help="steps of each kind; the median counts")] = 200,
) -> None:
    """What planning a batch for the GPU costs the host, against planning it from nothing. Needs no GPU."""
    with needing_extra("gpu"):
        from radixkv.bench.gpu.plan import run_plan

    run_plan(console_for(json_path), steps, json_path)


@app.command()
def routing(
    decisions: Annotated[int, typer.Option(min=1, help="how many to measure")] = 5000, json_path: JsonPath = None
) -> None:
    """What it costs to choose one of 16 replicas for a prompt, with a million blocks known."""
    from radixkv.bench.cluster.routing import run_routing

    run_routing(console_for(json_path), decisions, json_path)


@app.command()
def decode(json_path: JsonPath = None, only: Only = None, resume: Resume = False) -> None:
    """Whole decoding steps of 8 billion weights on a GPU, against what they must cost and transformers."""
    from radixkv.bench.gpu.decode import run_decode

    _exit_unless(run_decode(console_for(json_path), json_path, only, resume))


@app.command()
def limits(json_path: JsonPath = None) -> None:
    """What a GPU can do at most: copying, reading, multiplying."""
    from radixkv.bench.gpu.limits import run_limits

    run_limits(console_for(json_path), json_path)


@app.command()
def first_light(
    json_path: JsonPath = None,
    minutes: Annotated[float, typer.Option(min=0.5, help="for this run; what is left goes on with --resume")] = 9,
    total_minutes: Annotated[float, typer.Option(min=0.5, help="for this run and all that it goes on with")] = 30,
    resume: Annotated[bool, typer.Option("--resume", help="go on where the file of --json ends")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="this part, also if it was run before; may be repeated")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(help="not this part; may be repeated")] = None,
) -> None:
    """Everything that must be known of a GPU on which RadixKV has not run yet: correctness, speed, what to set."""
    from radixkv.bench.gpu.first_light import run_first_light
    from radixkv.bench.gpu.first_light_parts import first_light_parts

    succeeded = run_first_light(
        console_for(json_path), json_path, first_light_parts(), minutes, total_minutes, resume, only or (), skip or ()
    )
    _exit_unless(succeeded)


@app.command()
def tier_reads(
    folder: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="on the disk to measure [default: temporary files]"),
    ] = None,
    rounds: RoundsInTurns = 5,
    json_path: JsonPath = None,
) -> None:
    """How fast the disk tier reads and writes blocks, against a plain loop over the same file and memcpy."""
    from radixkv.bench.tiers.reads import run_tier_reads

    run_tier_reads(console_for(json_path), folder, rounds, json_path)


@app.command()
def quality(json_path: JsonPath = None) -> None:
    """What bfloat16, int8 and int4 cost in perplexity and in the likeliest tokens, on a CPU."""
    from radixkv.bench.engine.quality import run_quality

    run_quality(console_for(json_path), json_path)


@app.command()
def check() -> None:
    """Run the fast benches, and report what became slower than the committed figures by more than the noise."""
    from radixkv.bench.check import run_check

    _exit_unless(run_check(console_for()))


@app.command()
def soak(
    minutes: Annotated[float, typer.Option(min=0.01, help="how long")] = 5,
    seed: Annotated[int, typer.Option(help="the same seed does the same work")] = 0,
    json_path: JsonPath = None,
) -> None:
    """Random work on the cache, every rule checked throughout."""
    from radixkv.bench.cache.soak import run_soak

    _exit_unless(run_soak(console_for(json_path), minutes, seed, json_path))


@app.command()
def soak_server(
    minutes: Annotated[float, typer.Option(min=0.05, help="how long")] = 10,
    seed: AttackSeed = 0,
    json_path: JsonPath = None,
) -> None:
    """Hostile clients beside normal ones on a real server."""
    with needing_extra("bench,server"):
        from radixkv.bench.serving.soak import run_soak_server

    _exit_unless(run_soak_server(console_for(json_path), minutes, seed, json_path))


@app.command()
def attacks(
    seconds: Annotated[float, typer.Option(min=0.1, help="for each attack")] = 4.0,
    seed: AttackSeed = 0,
    checkout: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="folder of another version, to attack it, too")
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """What each way of attacking a server costs the others: first tokens, gaps between tokens, health checks."""
    with needing_extra("bench,server"):
        from radixkv.bench.serving.attacks import run_attacks

    run_attacks(console_for(json_path), seconds, seed, checkout, json_path)


@app.command()
def serve(
    context: typer.Context,
    url: Annotated[str, typer.Option(help="an OpenAI-compatible server")] = "http://127.0.0.1:8000",
    json_path: JsonPath = None,
    plot: PlotPath = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="begin so many conversations a second, at random moments")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="without --rate: conversations at a time")] = 16,
    conversations: Annotated[int, typer.Option(min=1, help="conversations in all")] = 64,
    turns: Annotated[int, typer.Option(min=1, help="questions in each, asked one after the other")] = 1,
    prefixes: Annotated[int, typer.Option(min=1, help="different system prompts")] = 1,
    prefix_tokens: Annotated[int, typer.Option(min=0, help="length of a system prompt; 0: none")] = 500,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="length of a question")] = 50,
    answer_tokens: Annotated[int, typer.Option(min=1, help="length of an answer")] = 64,
    ignore_eos: Annotated[bool, typer.Option(help="ask for answers of full length; not all servers know it")] = True,
    model: Annotated[str | None, typer.Option(help="the model's name [default: the first that is served]")] = None,
    api_key: Annotated[str | None, typer.Option()] = None,
    seed: Annotated[int, typer.Option(help="another seed, other words: a server remembers those of earlier runs")] = 0,
) -> None:
    """Put load on a server: latencies as median and p99, throughput, what was cached."""
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
    _exit_unless(run_serve(console_for(json_path, plot), client, url, shape, arrivals, json_path, plot))


@app.command()
def fairness(
    model: Model = None,
    rounds: RoundsInTurns = 3,
    json_path: JsonPath = None,
    plot: PlotPath = None,
) -> None:
    """One greedy tenant beside three modest ones: their waiting times, throughput, what was cached."""
    from radixkv.bench.engine.fairness import run_fairness

    run_fairness(console_for(json_path, plot), model, rounds, json_path, plot)


@app.command()
def http_cost(
    model: Model = None,
    streams: Annotated[int, typer.Option(min=1, help="answers at a time")] = 64,
    answer_tokens: Annotated[int, typer.Option(min=2, help="length of each")] = 64,
    rounds: Rounds = 3,
    json_path: JsonPath = None,
) -> None:
    """What HTTP costs, against the same load on the engine in the same run."""
    with needing_extra("bench,server"):
        from radixkv.bench.serving.http_cost import run_http_cost

    run_http_cost(console_for(json_path), model, streams, answer_tokens, rounds, json_path)


@app.command()
def tiers(
    model: Model = None,
    conversations: Annotated[int, typer.Option(min=32, help="of a working set four times the pool")] = 48,
    turns: Annotated[int, typer.Option(min=1, help="of each conversation")] = 5,
    rounds: RoundsInTurns = 3,
    shared_cache: Annotated[
        str | None, typer.Option(help="measure this shared store, too: a folder, or a Redis or Valkey server's URL")
    ] = None,
    json_path: JsonPath = None,
    plot: PlotPath = None,
) -> None:
    """What tiers below the pool bring and cost: restarts, a working set too large, writing, a shared store."""
    from radixkv.bench.tiers.benefit import run_tiers

    run_tiers(console_for(json_path, plot), model, conversations, turns, rounds, shared_cache, json_path, plot)


@app.command("cluster")
def cluster_bench(
    model: Model = None,
    replicas: Annotated[
        list[int] | None, typer.Option(min=2, help="of the larger cluster; may be repeated", show_default="2")
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="answers at a time")] = 32,
    rounds: RoundsInTurns = 3,
    json_path: JsonPath = None,
) -> None:
    """What an ingress over replicas costs against one server, and what it finds cached."""
    with needing_extra("cluster"):
        from radixkv.bench.cluster.ingress import run_cluster_bench

    run_cluster_bench(console_for(json_path), model, replicas or [2], streams, rounds, json_path)


@app.command()
def replica_memory(
    model: Model = None,
    replicas: Annotated[int, typer.Option(min=2, help="side by side")] = 2,
    json_path: JsonPath = None,
) -> None:
    """What each of several replicas takes of a machine's memory, with weights of its own and with shared ones."""
    with needing_extra("cluster"):
        from radixkv.bench.cluster.replica_memory import run_replica_memory

    run_replica_memory(console_for(json_path), model, replicas, json_path)


@app.command()
def chaos(
    model: Model = None,
    replicas: Annotated[int, typer.Option(min=2, help="replicas")] = 2,
    streams: Annotated[int, typer.Option(min=1, help="requests in all")] = 200,
    concurrency: Annotated[int, typer.Option(min=1, help="requests at a time")] = 16,
    seconds: Annotated[float, typer.Option(min=0.1, help="between kills, on average")] = 4.0,
    answer_tokens: Annotated[int, typer.Option(min=32, help="of an answer at most")] = 48,
    seed: Annotated[int, typer.Option(help="of who is killed when")] = 0,
    json_path: JsonPath = None,
) -> None:
    """Kill replicas while they answer, and the ingress once: every stream must complete with its text."""
    with needing_extra("cluster"):
        from radixkv.bench.cluster.chaos import run_chaos

    succeeded = run_chaos(
        console_for(json_path), model, replicas, streams, concurrency, seconds, answer_tokens, seed, json_path
    )
    _exit_unless(succeeded)
