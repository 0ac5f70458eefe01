"""`radixkv inspect`, `simulate` and `explain`: seeing into the cache."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from radixkv.cli.consoles import PlainConsole, console_for
from radixkv.cli.options import JsonPath, Model, is_given, variable_of, with_options_of
from radixkv.cli.output_paths import given_path, writable, writable_plot
from radixkv.config import DEFAULT_BLOCK_SIZE, EngineConfig
from radixkv.observe.simulate.replicas.cost_model import CostModel

if TYPE_CHECKING:
    from radixkv.observe.simulate.replicas.report import ReplicaReport
    from radixkv.observe.simulate.report import Report


def inspect(
    source: Annotated[
        str, typer.Argument(help="a snapshot's file, or its URL: /admin/snapshot of a server, or of an ingress")
    ],
    admin_key: Annotated[
        str | None, typer.Option(help="the server's admin key, if it has one", envvar=variable_of("admin_key"))
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the snapshot as JSON")] = False,
    svg: Annotated[
        Path | None,
        typer.Option(parser=given_path, metavar="<path>", callback=writable, help="draw the tree into this file"),
    ] = None,
) -> None:
    """Show what is cached: the tree, its largest and hottest prefixes, what sharing saves."""
    from radixkv.observe.inspect.picture import to_svg
    from radixkv.observe.inspect.replica_snapshots import join_snapshots
    from radixkv.observe.inspect.source import read_source
    from radixkv.observe.inspect.terminal import draw

    snapshots = read_source(source, admin_key)
    if svg is not None:
        if len(snapshots) != 1:
            raise ValueError(
                f"--svg: expected one cache, got those of {len(snapshots)} replicas; see /admin/replicas/NAME/snapshot"
            )
        svg.write_text(to_svg(*snapshots.values()), encoding="utf-8")
    if as_json:
        named = {name: snapshot.to_json() for name, snapshot in snapshots.items() if name is not None}
        print(snapshots[None].to_json() if None in snapshots else join_snapshots(named))
        return
    console = PlainConsole()
    if not snapshots:
        console.print("no replica is there")
    for name, snapshot in snapshots.items():
        if name is not None:
            console.rule(Text(f"replica {name}"), align="left")
        console.print(draw(snapshot))


_COST = CostModel()
_PREFILL_MS, _DECODE_MS, _STEP_MS = (1000 * seconds for seconds in (_COST.prefill, _COST.decode, _COST.step))

# Options of `simulate` that have an effect only with --replicas, and only without.
_OF_REPLICAS = ("router", "load", "ingresses", "decode_ms", "step_ms")
_OF_ONE_CACHE = ("policy", "bytes_per_token", "tier")


def simulate(
    context: typer.Context,
    trace: Annotated[
        str, typer.Argument(help="a trace file, or one of chats, agents, documents, long-documents, mixed, scans")
    ],
    blocks: Annotated[
        str | None,
        typer.Option(
            help="cache sizes, in blocks (1000,2000) or as shares of the distinct blocks (2%,5%); with --replicas one, "
            "of all caches together",
            show_default="2%,5%,10%,20%; with --replicas 30%",
        ),
    ] = None,
    policy: Annotated[str, typer.Option(help="names of eviction policies, or all")] = "all",
    bytes_per_token: Annotated[
        int | None, typer.Option(help="bytes of keys and values per token, to print sizes in GiB", min=1)
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=SIZE@MS, such as host=50%@0.02: a tier below the pool, its blocks or share of the distinct ones, and "
            "milliseconds to load a block; may be repeated, the nearest first. They lie below the first --policy."
        ),
    ] = None,
    json_path: JsonPath = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            parser=given_path,
            metavar="<path>",
            callback=writable_plot,
            help="draw hit rates against sizes into this file",
        ),
    ] = None,
    replicas: Annotated[
        str | None, typer.Option(help="numbers of replicas, such as 4,16: compare routers, not policies")
    ] = None,
    router: Annotated[str, typer.Option(help="with --replicas: names of routers, or all")] = "all",
    load: Annotated[
        float,
        typer.Option(help="with --replicas: utilization to simulate; the trace's time is stretched to reach it"),
    ] = 0.85,
    ingresses: Annotated[
        int, typer.Option(help="with --replicas: number of ingresses, each with its own prefix router", min=1)
    ] = 1,
    prefill_ms: Annotated[
        float, typer.Option(help="with --replicas or --tier: milliseconds per prompt token", min=1e-6)
    ] = _PREFILL_MS,
    decode_ms: Annotated[
        float, typer.Option(help="with --replicas: milliseconds per generated token", min=0)
    ] = _DECODE_MS,
    step_ms: Annotated[
        float, typer.Option(help="with --replicas: milliseconds per step, whatever the batch", min=1e-6)
    ] = _STEP_MS,
) -> None:
    """Replay a trace through the cache, without a model: which policy, how much memory, what below it, how many replicas?"""
    for name in _OF_REPLICAS if replicas is None else _OF_ONE_CACHE:
        if is_given(context, name):
            how = "only" if replicas is None else "not together"
            raise ValueError(f"--{name.replace('_', '-')}: {how} with --replicas")
    for name, milliseconds in (("prefill", prefill_ms), ("decode", decode_ms), ("step", step_ms)):
        if not math.isfinite(milliseconds):
            raise ValueError(f"--{name}-ms: expected a finite number of milliseconds, got {milliseconds}")
    console = console_for(json_path, plot)
    report: Report | ReplicaReport
    if replicas is None:
        if not tier and is_given(context, "prefill_ms"):
            raise ValueError("--prefill-ms: only with --replicas or --tier")
        from radixkv.observe.simulate.report import simulate_trace

        sizes = "2%,5%,10%,20%" if blocks is None else blocks
        report = simulate_trace(console, trace, sizes, policy, bytes_per_token, tier or (), prefill_ms / 1000)
    else:
        from radixkv.observe.simulate.replicas.report import DEFAULT_BLOCKS, simulate_replicas

        cost = CostModel(prefill_ms / 1000, decode_ms / 1000, step_ms / 1000)
        size = DEFAULT_BLOCKS if blocks is None else blocks
        report = simulate_replicas(console, trace, replicas, router, size, load, ingresses, cost)
    from radixkv.bench.common.figures import write_figures

    write_figures(json_path, asdict(report))
    if plot is not None:
        report.plot(plot)
    report.print_to(console)


@with_options_of(EngineConfig, only=("block_size",))
def explain(
    prompt: Annotated[str, typer.Argument(help="the prompt to explain")],
    after: Annotated[list[str], typer.Option(help="a prompt that was answered before it; may be repeated")],
    model: Model = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    **engine_options: Any,
) -> None:
    """Show how much of a prompt would be reused after earlier ones, and where it differs from them.

    Needs only the model's tokenizer. For a running cache, use `LLM.explain`.
    """
    from radixkv.model.tokenizer import load_tokenizer
    from radixkv.observe.prompt_explanation import explain_after
    from radixkv.sampling.detokenizer import decode_token

    tokenizer = load_tokenizer(model)
    block_size = engine_options["block_size"] or DEFAULT_BLOCK_SIZE
    explanation = explain_after(prompt, after, tokenizer, partial(decode_token, tokenizer), block_size)
    print(json.dumps(explanation.as_dict()) if as_json else explanation)
