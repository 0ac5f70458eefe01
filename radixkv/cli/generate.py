"""`radixkv chat` and `radixkv generate`: answers in the terminal."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from radixkv.cli.consoles import PlainConsole
from radixkv.cli.options import Model, is_given, with_options_of
from radixkv.config import EngineConfig, ModelConfig

_LLM_OPTIONS = (
    "dtype",
    "device",
    "max_model_len",
    "quantization",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "speculative_config",
    "record_trace",
)
# Options of `generate` that have no effect on a beam search.
_OF_SAMPLING = ("n", "temperature", "top_p", "seed")


@with_options_of(ModelConfig, EngineConfig, only=_LLM_OPTIONS)
def chat(
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="system prompt")] = None,
    max_tokens: Annotated[int, typer.Option(help="maximum number of tokens per answer")] = 512,
    temperature: Annotated[float, typer.Option(help="sampling temperature; 0: greedy")] = 0.0,
    **options: Any,
) -> None:
    """Chat with a model; each answer shows how much of its prompt was reused."""
    if sys.stdin is None:
        raise ValueError("standard input is closed, and turns are read from it")
    from radixkv import LLM, Chat, SamplingParams
    from radixkv.cli.terminal_chat import run_chat

    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    console = PlainConsole()
    with console.status("loading the model"):
        llm = LLM(model, **options)
    run_chat(Chat(llm, system, params), console)


@with_options_of(ModelConfig, EngineConfig, only=_LLM_OPTIONS)
def generate(
    context: typer.Context,
    prompts: Annotated[list[str], typer.Argument(help="one or more prompts")],
    model: Model = None,
    n: Annotated[int, typer.Option(help="answers per prompt")] = 1,
    max_tokens: Annotated[int, typer.Option(help="maximum number of tokens per answer")] = 64,
    temperature: Annotated[
        float | None, typer.Option(help="sampling temperature; 0: greedy", show_default="0; with several answers 1")
    ] = None,
    top_p: Annotated[
        float, typer.Option(help="sample from the smallest set of tokens whose probabilities sum to at least this")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="seed; the same seed gives the same answers")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="stop string, which ends an answer; may be repeated")] = None,
    beam_width: Annotated[int, typer.Option(help="beam search with this many beams, instead of sampling; 0: none")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON lines")] = False,
    **options: Any,
) -> None:
    """Complete prompts and print the completions."""
    from radixkv import BeamSearchParams, SamplingParams

    if beam_width:
        for name in _OF_SAMPLING:
            if is_given(context, name):
                raise ValueError(f"--{name.replace('_', '-')}: not together with --beam-width, which does not sample")
    # Checked before importing and loading, which take seconds: a mistyped option should not wait for them.
    beam_params = BeamSearchParams(beam_width, max_tokens, stop=stop) if beam_width else None
    if temperature is None:
        temperature = 0.0 if n == 1 else 1.0  # at 0, all answers would be the same
    params = SamplingParams(n=n, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop)
    with PlainConsole(stderr=True).status("loading the model"):
        from radixkv import LLM

        llm = LLM(model, **options)
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
