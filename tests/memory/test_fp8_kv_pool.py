"""Keys and values as float8: rounded as torch rounds, clamped, and read back the same everywhere."""

from __future__ import annotations

import math

import pytest
import torch
from support.poisoned_pool import poison

from radixkv.cache import BlockCopy
from radixkv.memory import Fp8KVPool, KVPool, KVScales, LayerShape
from radixkv.memory.fp8_kv_pool import FP8

SHAPES = [LayerShape(2, 8, 12), LayerShape(1, 16, 16)]
SCALES = KVScales(
    [torch.tensor([0.25, 8.0]), torch.tensor([1.0])], [torch.tensor([2.0**-9, 1.0]), torch.tensor([2.0**5])]
)


def make_pool(dtype: torch.dtype = torch.float32) -> Fp8KVPool:
    return Fp8KVPool(SHAPES, 6, 4, SCALES, dtype)


def random_tokens(layer: int, count: int, spread: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of very different sizes, with the heads outside as a model gives them."""
    shape = SHAPES[layer]
    key, value = (
        (torch.randn(shape.num_kv_heads, count, dim) * torch.exp(spread * torch.randn(shape.num_kv_heads, count, dim)))
        for dim in (shape.key_dim, shape.value_dim)
    )
    return key.transpose(0, 1), value.transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_read_is_torchs_rounding_whatever_way_it_is_read(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pool = make_pool(dtype)
    poison(pool, range(6))
    for layer in range(2):
        slots = torch.tensor([9, 3, 10, 11, 20])
        given = [tensor.to(dtype) for tensor in random_tokens(layer, 5)]
        written = pool.write(layer, slots, *given)
        for number, source, scale in zip((0, 1), given, pool.scales(layer), strict=True):
            quotient = (source.float() / scale[:, None]).clamp(-448, 448)
            expected = quotient.to(FP8).to(dtype) * scale.to(dtype)[:, None]
            assert expected.isfinite().all()
            assert torch.equal(written[number], expected)
            assert torch.equal(pool.gather(layer, slots)[number], expected)
            assert torch.equal(pool.read(layer, 9, 12)[number], expected[[0, 2, 3]])
            assert written[number].dtype == dtype


def test_errors_are_a_sixteenth_at_most_within_the_range_of_the_scale() -> None:
    torch.manual_seed(1)
    pool = make_pool()
    numbers = torch.exp2(torch.rand(4, 2, 8) * 14 - 6) * SCALES.keys[0][:, None]
    stored, _ = pool.write(0, torch.arange(4), numbers, torch.zeros(4, 2, 12))
    assert ((stored - numbers).abs() <= numbers / 16).all()
    assert (stored != numbers).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_too_large_becomes_the_largest(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    scales = KVScales.for_largest([torch.tensor([1.0, 60_000.0])], [torch.tensor([0.01, 3.0])], dtype)
    pool = Fp8KVPool(SHAPES[:1], 1, 4, scales, dtype)
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None, None]
    size = torch.tensor([largest, largest, math.inf, math.inf])[:, None, None]
    key, value = (sign * size * torch.ones(4, 2, dim) for dim in (8, 12))
    stored = pool.write(0, torch.arange(4), key.to(dtype), value.to(dtype))
    for tensor, scale in zip(stored, pool.scales(0), strict=True):
        assert torch.equal(tensor.float(), sign * 448 * scale[:, None].expand(2, tensor.shape[2]))
    assert all(torch.equal(read, tensor) for read, tensor in zip(pool.read(0, 0, 4), stored, strict=True))


def test_scales_are_powers_of_two_with_room_above_what_was_seen() -> None:
    # Around powers of two, too, where a scale changes.
    largest = torch.tensor([0.0, 3e38, 1e-20, 0.3, 6.99, 7.0, 7.01, 447.0, 448.0, 449.0])
    made = KVScales.for_largest([largest], [torch.ones(1)], torch.float32)
    (scales,) = made.keys
    assert [scale.tolist() for scale in made.values] == [[2.0**-6]]
    assert torch.equal(torch.exp2(scales.log2().round()), scales)
    assert scales[0] == 1.0
    room = 448 * scales / largest
    assert ((room[2:] >= 4) & (room[2:] < 8)).all()
    assert (448 * scales).isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_keys_that_are_not_finite_are_refused(bad: float) -> None:
    fine, broken = torch.ones(2), torch.tensor([1.0, bad])
    with pytest.raises(ValueError, match=r"values of attention layer 1 are not finite: \[1.0, (nan|inf)\]"):
        KVScales.for_largest([fine, fine], [fine, broken], torch.float32)


def test_scales_of_other_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scales: expected shapes \[\(2,\), \(1,\)\] for values, got \[\(2,\)\]"):
        Fp8KVPool(SHAPES, 6, 4, KVScales(SCALES.keys, SCALES.values[:1]), torch.float32)


def test_a_block_is_copied_as_it_is() -> None:
    torch.manual_seed(2)
    pool = make_pool()
    poison(pool, range(6))
    written = [pool.write(layer, torch.arange(4, 8), *random_tokens(layer, 4)) for layer in range(2)]
    pool.copy_blocks([BlockCopy(1, 3, 3), BlockCopy(3, 0, 2)])
    for layer in range(2):
        for number in range(2):
            assert torch.equal(pool.read(layer, 12, 15)[number], written[layer][number][:3])
            assert torch.equal(pool.read(layer, 0, 2)[number], written[layer][number][:2])
            assert pool.read(layer, 15, 16)[number].isnan().all()
            assert pool.read(layer, 2, 4)[number].isnan().all()


def test_a_number_takes_one_byte() -> None:
    assert make_pool().nbytes * 4 == KVPool(SHAPES, 6, 4, torch.float32).nbytes
    assert make_pool(torch.bfloat16).nbytes * 2 == KVPool(SHAPES, 6, 4, torch.bfloat16).nbytes
    assert make_pool().nbytes == sum(t.nbytes for t in (*make_pool().keys, *make_pool().values))
