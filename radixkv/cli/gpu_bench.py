"""`radixkv bench`: the commands that measure a GPU, and its plan."""

from __future__ import annotations

from typing import Annotated

import typer

from radixkv.cli.consoles import console_for
from radixkv.cli.exits import exit_unless
from radixkv.cli.options import JsonPath
from radixkv.extras import needing_extra

app = typer.Typer()

Only = Annotated[str | None, typer.Option(help="only rows whose name contains this")]
Resume = Annotated[bool, typer.Option("--resume", help="skip the rows that the file already has")]


@app.command()
def attention(json_path: JsonPath = None, only: Only = None, resume: Resume = False) -> None:
    """One layer's attention, cache writes, block copies and sampling on a GPU, against their lower bounds."""
    from radixkv.bench.gpu.attention import run_attention

    exit_unless(run_attention(console_for(json_path), json_path, only, resume))


@app.command()
def tiles(json_path: JsonPath = None, only: Only = None, resume: Resume = False) -> None:
    """The fastest tile configurations on a GPU, and the sizes from which sharing and splitting pay."""
    from radixkv.bench.gpu.tiles import run_tiles

    exit_unless(run_tiles(console_for(json_path), json_path, only, resume))


@app.command()
def plan(
    json_path: JsonPath = None,
    steps: Annotated[int, typer.Option(min=1, help="steps of each kind; the median is reported")] = 200,
) -> None:
    """Host time to plan a batch for the GPU incrementally, against planning it anew. Needs no GPU."""
    with needing_extra("gpu"):
        from radixkv.bench.gpu.plan import run_plan

    run_plan(console_for(json_path), steps, json_path)


@app.command()
def decode(json_path: JsonPath = None, only: Only = None, resume: Resume = False) -> None:
    """Whole decoding steps of a model with 8 billion weights on a GPU, against their lower bound and transformers."""
    from radixkv.bench.gpu.decode import run_decode

    exit_unless(run_decode(console_for(json_path), json_path, only, resume))


@app.command()
def limits(json_path: JsonPath = None) -> None:
    """A GPU's peak rates: copying, reading, multiplying."""
    from radixkv.bench.gpu.limits import run_limits

    run_limits(console_for(json_path), json_path)


@app.command()
def first_light(
    json_path: JsonPath = None,
    minutes: Annotated[
        float, typer.Option(min=0.5, help="time limit of this run; --resume continues with what is left")
    ] = 9,
    total_minutes: Annotated[
        float, typer.Option(min=0.5, help="time limit of this run and those that it resumes, together")
    ] = 30,
    resume: Annotated[bool, typer.Option("--resume", help="continue where the file of --json ends")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="run only this part, even if it was run before; may be repeated")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(help="leave out this part; may be repeated")] = None,
) -> None:
    """All checks and benches of a GPU model on which RadixKV has not run yet: correctness, speed, constants to set."""
    from radixkv.bench.gpu.first_light import run_first_light
    from radixkv.bench.gpu.first_light_parts import first_light_parts

    succeeded = run_first_light(
        console_for(json_path),
        json_path,
        first_light_parts(),
        minutes=minutes,
        total_minutes=total_minutes,
        resume=resume,
        only=only or (),
        skip=skip or (),
    )
    exit_unless(succeeded)
