"""Which launches are repeated for other layers, with what arguments, and what that keeps alive; no kernel reaches a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.attention_batches import Chunk, Table, query_batch
from support.compiled_kernels import pretended_gpu
from triton.runtime.jit import JITFunction

from radixkv.attention import AttentionOptions, NewTokens
from radixkv.attention.triton import TritonBackend, cost_model
from radixkv.memory import KVPool, LayerShape

LAYERS = [LayerShape(2, 16, 16)] * 3 + [LayerShape(1, 16, 16)]
OPTIONS = AttentionOptions(0.3)


@dataclass
class Launches:
    """What was launched: kernel, grid, and arguments by name, with tensors as their addresses."""

    checked: list[tuple[str, Any, dict[str, Any]]] = field(default_factory=list)
    repeated: list[tuple[str, Any, dict[str, Any]]] = field(default_factory=list)


def _noted(names: list[str], arguments: Any) -> dict[str, Any]:
    return {
        name: argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
        for name, argument in zip(names, arguments, strict=True)
    }


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Pretended CUDA: launchers check their arguments, and nothing is compiled."""
    launches = Launches()

    class Compiled:
        def __init__(self, kernel: JITFunction) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
            names, name = self._kernel.arg_names, self._kernel.fn.__name__
            return lambda *arguments: launches.repeated.append((name, grid, _noted(names, arguments)))

    def run(kernel: JITFunction, *args: object, grid: tuple[int, ...], warmup: bool, **options: Any) -> Compiled:
        names = kernel.arg_names
        arguments = [*args, *(options[name] for name in names[len(args) :])]
        launches.checked.append((kernel.fn.__name__, (*grid, 1, 1)[:3], _noted(names, arguments)))
        return Compiled(kernel)

    # Small batches share.
    monkeypatch.setattr(cost_model, "MIN_SAVED_BYTES", 1024)
    with pretended_gpu(run):
        yield launches


def make_backend(dtype: torch.dtype = torch.bfloat16) -> TritonBackend:
    return TritonBackend(KVPool(LAYERS, 40, 16, dtype), torch.bfloat16, 16, 8, 160, multiprocessors=132)


def chunks(shared_blocks: int, num_new: int) -> list[Chunk]:
    """Three sequences."""
    tables = [Table([*range(shared_blocks), *range(20 + 5 * own, 25 + 5 * own)]) for own in range(3)]
    return [Chunk(table, 16 * shared_blocks + 3, num_new) for table in tables]


def new_tokens(rows: int, heads: tuple[int, int, int] = (16, 2, 2)) -> NewTokens:
    return NewTokens(*(torch.zeros(1, count, rows, 16, dtype=torch.bfloat16) for count in heads))


@pytest.mark.parametrize(
    ("shared_blocks", "num_new", "kernels"),
    [
        (4, 1, ["_write_cache", "_attend_items", "_merge"]),
        (0, 1, ["_write_cache", "_attend_split"]),
        (2, 30, ["_write_cache", "_attend_items"]),
    ],
    ids=["shared", "flat", "prompts"],
)
@torch.inference_mode()
def test_a_repeated_launch_is_what_a_checked_one_would_have_been(
    shared_blocks: int, num_new: int, kernels: list[str], launches: Launches
) -> None:
    backend = make_backend()
    batch = query_batch(chunks(shared_blocks, num_new))
    attention = backend.prepare(batch)
    rows = int(attention.row_starts[-1])
    attention.attend(0, new_tokens(rows), OPTIONS)
    assert not launches.repeated
    launches.checked.clear()
    own = new_tokens(rows)
    output = attention.attend(1, own, OPTIONS)
    assert not launches.checked
    assert [name for name, _, _ in launches.repeated] == kernels
    # The same layer with all checks, where nothing was launched before. Options that were equal, and the memory that it is
    # given for its output, are other objects.
    attention._repeated.clear()
    truth = attention.attend(1, own, AttentionOptions(0.3))
    addresses = {output.data_ptr(): "output", truth.data_ptr(): "output"}
    again, expected = (
        [
            (name, grid, {key: addresses.get(value, value) for key, value in arguments.items()})
            for name, grid, arguments in noted
        ]
        for noted in (launches.repeated, launches.checked)
    )
    assert again == expected


@torch.inference_mode()
def test_layers_that_are_not_alike_are_checked_each(launches: Launches) -> None:
    attention = make_backend().prepare(query_batch(chunks(4, 1)))
    query, key, value, _ = new_tokens(3)
    elsewhere = torch.zeros(query.numel() + 1, dtype=query.dtype)[1:].view_as(query)
    assert elsewhere.data_ptr() % 16
    turned = torch.zeros(1, 3, 2, 16, dtype=key.dtype).transpose(1, 2)
    sinks = torch.zeros(16)
    calls: list[tuple[int, NewTokens, AttentionOptions]] = [
        (0, NewTokens(query, key, value), OPTIONS),
        (0, NewTokens(elsewhere, key, value), OPTIONS),
        (0, NewTokens(query, turned, value), OPTIONS),
        (0, NewTokens(query, key, value), AttentionOptions(0.4)),
        (0, NewTokens(query, key, value), AttentionOptions(0.3, softcap=2.0)),
        (0, NewTokens(query, key, value), AttentionOptions(0.3, sliding_window=7)),
        (0, NewTokens(query, key, value), AttentionOptions(0.3, sinks=sinks)),
        (3, new_tokens(3, (16, 1, 1)), OPTIONS),
    ]
    for number, (layer, new, options) in enumerate(calls):
        launches.checked.clear()
        attention.attend(layer, new, options)
        assert launches.checked, number
    assert not launches.repeated
    for layer, new, options in calls:
        launches.checked.clear()
        attention.attend(layer, new, options)
        assert not launches.checked


@torch.inference_mode()
def test_what_a_kernel_cannot_take_is_refused_after_layers_that_it_took(launches: Launches) -> None:
    attention = make_backend().prepare(query_batch(chunks(4, 1)))
    query, key, value, _ = new_tokens(3)
    attention.attend(0, NewTokens(query, key, value), OPTIONS)
    for bad, message in (
        ((query, key, value.float()), "value: expected bfloat16"),
        ((query[..., :8], key, value), "query: expected shape"),
        ((query, key[:, :1], value[:, :1]), "key: expected shape"),
    ):
        with pytest.raises(ValueError, match=message):
            attention.attend(1, NewTokens(*bad), OPTIONS)


@torch.inference_mode()
def test_nothing_of_a_layer_or_a_batch_is_kept_alive(launches: Launches) -> None:
    """A layer's queries for a prompt take as much memory as its activations, and partial results even more."""
    backend = make_backend()
    attention = backend.prepare(query_batch(chunks(4, 30)))
    new = new_tokens(90)
    outputs = [attention.attend(layer, new, OPTIONS) for layer in (0, 1)]
    kept = [weakref.ref(tensor) for tensor in (*new[:3], *outputs)]
    gc.disable()
    try:
        del new, outputs
        assert not any(tensor() is not None for tensor in kept)
        dropped = weakref.ref(attention)
        del attention
        backend.prepare(query_batch(chunks(0, 1)))
        assert dropped() is None
    finally:
        gc.enable()
