"""The command line: it parses and calls. Heavy imports wait until a command needs them, so that `--help` is instant."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from radixkv.cli.output_paths import writable, writable_plot

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Prefix caching for language models.")
bench = typer.Typer(no_args_is_help=True, help="Measure, always against a baseline in the same run.")
app.add_typer(bench, name="bench")

Model = Annotated[str | None, typer.Option(help="hub id, folder or GGUF file; by default SmolLM2-135M-Instruct")]
RecordTrace = Annotated[
    Path | None,
    typer.Option("--record-trace", callback=writable, help="write a trace without any text, for radixkv simulate"),
]
KvCacheDtype = Annotated[str, typer.Option(help="what keys and values are stored in: auto (the model's type) or fp8")]
JsonPath = Annotated[Path | None, typer.Option("--json", callback=writable, help="also write the figures to this file")]


@app.command()
def chat(
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="system prompt")] = None,
    max_tokens: Annotated[int, typer.Option(help="tokens of an answer at most")] = 512,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token")] = 0.0,
    kv_cache_dtype: KvCacheDtype = "auto",
    record_trace: RecordTrace = None,
) -> None:
    """Talk to a model; under each answer stands how much of the prompt was reused."""
    from radixkv import LLM, Chat, SamplingParams
    from radixkv.cli.terminal_chat import run_chat

    if sys.stdin is None:
        raise ValueError("standard input is closed, and turns are read from it")
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    console = Console()
    with console.status("loading the model"):
        llm = LLM(model, kv_cache_dtype=kv_cache_dtype, record_trace=record_trace)
    run_chat(Chat(llm, system, params), console)


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(help="one or more prompts")],
    model: Model = None,
    n: Annotated[int, typer.Option(help="answers to each prompt")] = 1,
    max_tokens: Annotated[int, typer.Option()] = 64,
    temperature: Annotated[float, typer.Option()] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int | None, typer.Option()] = None,
    stop: Annotated[list[str] | None, typer.Option(help="a string that ends an answer; may be repeated")] = None,
    beam_width: Annotated[int, typer.Option(help="search with this many beams instead of sampling")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON lines")] = False,
    kv_cache_dtype: KvCacheDtype = "auto",
    record_trace: RecordTrace = None,
) -> None:
    """Complete prompts and print the completions."""
    from radixkv import LLM, BeamSearchParams, SamplingParams

    # Before loading, which takes seconds: a mistyped option should not wait for it.
    beam_params = BeamSearchParams(beam_width, max_tokens, stop=stop) if beam_width else None
    params = SamplingParams(n=n, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop)
    with Console(stderr=True).status("loading the model"):
        llm = LLM(model, kv_cache_dtype=kv_cache_dtype, record_trace=record_trace)
    if beam_params is not None:
        for search in llm.beam_search(prompts, beam_params):
            for beam in search.sequences:
                line = json.dumps({"text": beam.text, "cum_logprob": beam.cum_logprob})
                print(line if as_json else f"[{beam.cum_logprob:.2f}] {beam.text}")
        return
    for output in llm.generate(prompts, params, use_tqdm=sys.stderr.isatty()):
        for sample in output.outputs:
            if as_json:
                print(json.dumps({**asdict(sample), "prompt": output.prompt, "cached": output.num_cached_tokens}))
            else:
                print(f"{output.prompt}{sample.text}")


@app.command()
def serve(
    model: Annotated[str | None, typer.Argument(help="hub id, folder or GGUF file [default: SmolLM2-135M]")] = None,
    host: Annotated[str, typer.Option(help="0.0.0.0: reachable from other machines")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="RADIXKV_API_KEYS", help="let in by this key only; may be repeated, each key is a tenant"),
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="RADIXKV_ADMIN_KEY", help="key for /admin; without it, administration is off")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="what requests call the model")] = None,
    max_queue: Annotated[int, typer.Option(min=0, help="requests that may wait to run; more are answered 429")] = 256,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="a longer request is answered 413")] = 8 << 20,
    grace_seconds: Annotated[float, typer.Option(min=0, help="after SIGTERM, time to finish what runs")] = 30.0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 or auto")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="prompt and answer together at most")] = None,
    block_size: Annotated[int, typer.Option(help="tokens a block")] = 16,
    num_blocks: Annotated[int | None, typer.Option(help="blocks for keys and values")] = None,
    kv_cache_memory_bytes: Annotated[
        int | None, typer.Option(help="the same in bytes [default: 1 GiB on a CPU]")
    ] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="without those two, share of a GPU's memory")] = 0.9,
    kv_cache_dtype: KvCacheDtype = "auto",
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="tokens a step at most [default: 8192 on a GPU, 512 on a CPU]")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="sequences that run side by side at most [default: 256 on a GPU, 64 on a CPU]")
    ] = None,
    attention_backend: Annotated[str, typer.Option(help="torch, triton or auto")] = "auto",
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="decode without CUDA graphs")] = False,
    enable_torch_compile: Annotated[
        bool, typer.Option("--enable-torch-compile", help="compile the model's layers at the start")
    ] = False,
    enable_prefix_caching: Annotated[bool, typer.Option(help="reuse what other requests computed")] = True,
    seed: Annotated[int, typer.Option(help="where the random numbers of requests without a seed begin")] = 0,
    eviction_policy: Annotated[str, typer.Option(help="what goes first when blocks run out")] = "lru",
    kv_events_endpoint: Annotated[
        str | None, typer.Option(help="publish KV events there, such as tcp://*:5557")
    ] = None,
    kv_events_replay_endpoint: Annotated[str | None, typer.Option(help="where subscribers ask for missed ones")] = None,
    record_trace: RecordTrace = None,
) -> None:
    """Serve a model over OpenAI's HTTP API."""
    from radixkv.model.onednn_cache import limit_primitive_cache

    # Before torch is imported; this process is a server and nothing else.
    limit_primitive_cache(os.environ)
    try:
        from radixkv.server.run import ServeOptions, run_server
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'radixkv[server]'") from error

    options = ServeOptions(
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        admin_key=admin_key,
        served_model_name=served_model_name,
        max_queue=max_queue,
        max_body_bytes=max_body_bytes,
        grace_seconds=grace_seconds,
    )
    engine_options = {
        "device": device,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "kv_cache_memory_bytes": kv_cache_memory_bytes,
        "gpu_memory_utilization": gpu_memory_utilization,
        "kv_cache_dtype": kv_cache_dtype,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "enable_prefix_caching": enable_prefix_caching,
        "attention_backend": attention_backend,
        "enforce_eager": enforce_eager,
        "enable_torch_compile": enable_torch_compile,
        "seed": seed,
        "eviction_policy": eviction_policy,
        "kv_events_endpoint": kv_events_endpoint,
        "kv_events_replay_endpoint": kv_events_replay_endpoint,
        "record_trace": record_trace,
    }
    raise typer.Exit(run_server(model, options, engine_options))


@app.command()
def demo(json_path: JsonPath = None) -> None:
    """A tour on the real default model: what sharing saves, and that the answers stay the same."""
    from radixkv.cli.demo import run_demo

    if not run_demo(Console(), json_path):
        raise typer.Exit(1)


@app.command()
def doctor(
    prepare: Annotated[bool, typer.Option("--prepare", help="convert the default model now, if it is not yet")] = False,
) -> None:
    """Say what was found on this machine, and what to do about what is missing."""
    from radixkv.cli.doctor import report
    from radixkv.model.default_model import ensure_converted, find_default_model

    console = Console()
    if prepare:
        ensure_converted(find_default_model(), console.print)
    report(console)


@app.command()
def inspect(
    source: Annotated[str, typer.Argument(help="a snapshot's file, or its URL: a server's /admin/snapshot")],
    admin_key: Annotated[str | None, typer.Option(help="for a server", envvar="RADIXKV_ADMIN_KEY")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the snapshot as JSON")] = False,
    svg: Annotated[Path | None, typer.Option(callback=writable, help="draw the tree into this file")] = None,
) -> None:
    """Show what is cached: the tree, its largest and hottest prefixes, what sharing saves."""
    from radixkv.observe.inspect.picture import to_svg
    from radixkv.observe.inspect.source import read_snapshot
    from radixkv.observe.inspect.terminal import draw

    snapshot = read_snapshot(source, admin_key)
    if svg is not None:
        svg.write_text(to_svg(snapshot))
    if as_json:
        print(snapshot.to_json())
    else:
        Console().print(draw(snapshot))


@app.command()
def simulate(
    trace: Annotated[str, typer.Argument(help="a trace file, or one of chats, agents, documents, scans")],
    blocks: Annotated[str, typer.Option(help="cache sizes: 1000,2000 or shares of the distinct blocks: 2%,5%")] = (
        "2%,5%,10%,20%"
    ),
    policy: Annotated[str, typer.Option(help="names of eviction policies, or all")] = "all",
    bytes_per_token: Annotated[int | None, typer.Option(help="of keys and values, to advise in GiB")] = None,
    json_path: JsonPath = None,
    plot: Annotated[
        Path | None, typer.Option(callback=writable_plot, help="draw hit rates against sizes into this file")
    ] = None,
) -> None:
    """Replay a trace through the cache, without a model: which policy, how much memory?"""
    from radixkv.observe.simulate.report import run_simulation

    run_simulation(Console(), trace, blocks, policy, bytes_per_token, json_path, plot)


@app.command()
def explain(
    prompt: Annotated[str, typer.Argument(help="the prompt that should have hit")],
    after: Annotated[list[str], typer.Option(help="a prompt that was answered before it; may be repeated")],
    model: Model = None,
    block_size: Annotated[int, typer.Option(min=1, help="tokens a block")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Say how much of a prompt others before it would have left in the cache, and where it parts from them.

    Needs the model's tokenizer only. `LLM.explain` says the same of a cache in use.
    """
    from radixkv.model.loader import load_tokenizer
    from radixkv.observe.explain import explain_after

    explanation = explain_after(prompt, after, load_tokenizer(model), block_size)
    print(json.dumps(explanation.as_dict()) if as_json else explanation)


@bench.command()
def e2e(
    json_path: JsonPath = None,
    rounds: Annotated[int, typer.Option(min=1, help="rounds; the median counts")] = 3,
    only: Annotated[str | None, typer.Option(help="workloads whose name contains this")] = None,
) -> None:
    """End to end against transformers' generate."""
    from radixkv.bench.e2e import run_e2e

    run_e2e(Console(), rounds, only, json_path)


@bench.command()
def cache(
    json_path: JsonPath = None,
    rounds: Annotated[int, typer.Option(min=1, help="rounds; the median counts")] = 15,
    scaling: Annotated[bool, typer.Option("--scaling", help="instead, how costs grow with prompts and trees")] = False,
    plot: Annotated[Path, typer.Option(help="where --scaling draws its plot")] = Path("cache-scaling.png"),
) -> None:
    """What the cache's bookkeeping costs, against a chain of block hashes."""
    if scaling:
        from radixkv.bench.scaling import run_scaling

        writable_plot(plot)
        run_scaling(Console(), json_path, plot)
    else:
        from radixkv.bench.cache import run_cache

        run_cache(Console(), rounds, json_path)


@bench.command()
def attention(
    json_path: JsonPath = None,
    only: Annotated[str | None, typer.Option(help="rows whose name contains this")] = None,
) -> None:
    """One layer's attention, cache writes, block copies and draws on a GPU, against what they must cost."""
    from radixkv.bench.attention import run_attention

    if not run_attention(Console(), json_path, only):
        raise typer.Exit(1)


@bench.command()
def tiles(
    json_path: JsonPath = None,
    only: Annotated[str | None, typer.Option(help="rows whose name contains this")] = None,
) -> None:
    """Which tile configuration is fastest on a GPU, and from when on sharing and splitting pay."""
    from radixkv.bench.tiles import run_tiles

    if not run_tiles(Console(), json_path, only):
        raise typer.Exit(1)


@bench.command()
def plan(
    json_path: JsonPath = None,
    steps: Annotated[int, typer.Option(min=1, help="steps of each kind; the median counts")] = 200,
) -> None:
    """What planning a batch for the GPU costs the host, against planning it from nothing. Needs no GPU."""
    from radixkv.bench.plan import run_plan

    run_plan(Console(), steps, json_path)


@bench.command()
def decode(
    json_path: JsonPath = None,
    only: Annotated[str | None, typer.Option(help="rows whose name contains this")] = None,
) -> None:
    """Whole decoding steps of 8 billion weights on a GPU, against what they must cost and transformers."""
    from radixkv.bench.decode import run_decode

    if not run_decode(Console(), json_path, only):
        raise typer.Exit(1)


@bench.command()
def soak(
    minutes: Annotated[float, typer.Option(min=0.01, help="how long")] = 5,
    seed: Annotated[int, typer.Option(help="the same seed does the same work")] = 0,
    json_path: JsonPath = None,
) -> None:
    """Random work on the cache, every rule checked throughout."""
    from radixkv.bench.soak import run_soak

    if not run_soak(Console(), minutes, seed, json_path):
        raise typer.Exit(1)


@bench.command("serve")
def bench_serve(
    url: Annotated[str, typer.Option(help="an OpenAI-compatible server")] = "http://127.0.0.1:8000",
    json_path: JsonPath = None,
    plot: Annotated[Path | None, typer.Option(callback=writable_plot, help="draw the latencies into this file")] = None,
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
    from radixkv.bench.serve import Arrivals, run_serve
    from radixkv.bench.serve_client import HttpClient
    from radixkv.bench.serve_workload import LoadShape

    shape = LoadShape(conversations, turns, prefixes, prefix_tokens, prompt_tokens, answer_tokens, seed)
    client = HttpClient(url, model, api_key, ignore_eos)
    if not run_serve(Console(), client, url, shape, Arrivals(rate, concurrency), json_path, plot):
        raise typer.Exit(1)


@bench.command()
def http_cost(
    model: Model = None,
    streams: Annotated[int, typer.Option(min=1, help="answers at a time")] = 64,
    answer_tokens: Annotated[int, typer.Option(min=2, help="length of each")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="rounds; the median counts")] = 3,
    json_path: JsonPath = None,
) -> None:
    """What HTTP costs, against the same load on the engine in the same run."""
    from radixkv.bench.http_cost import run_http_cost

    run_http_cost(Console(), model, streams, answer_tokens, rounds, json_path)


def main() -> None:
    """Run a command; what a user can mend is one line on standard error, not a traceback."""
    # Models write any character; a terminal that cannot show one shows its number.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except (ValueError, TypeError, OSError, MemoryError) as error:
        _fail(error)
    except Exception as error:
        # Named, not imported above: the engine's errors are light, but a mistyped option must not wait for anything.
        from radixkv.errors import EngineError

        if not isinstance(error, EngineError):
            raise
        _fail(error)


def _fail(error: Exception) -> None:
    print(f"radixkv: {error}", file=sys.stderr)
    raise SystemExit(1) from None
