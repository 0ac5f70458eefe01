"""What native code cannot take is refused with an error that shows it, and nothing is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from radixkv_cpu import PackedWeight, PagedAttention, is_packable, library, rms_norm, rope_, write_cache

pytestmark = pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")

HALF = torch.float16
META = torch.device("meta")


BAD_WEIGHTS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"weights": []}, r"weights: expected float32, or bfloat16 .* got \[\]"),
    "type": (
        {"weights": [torch.zeros(3, 32, dtype=HALF)]},
        r"weights: expected float32, .*\(\[3, 32\], torch.float16",
    ),
    "bfloat16 inputs": (
        {"weights": [torch.zeros(3, 33, dtype=torch.bfloat16)]},
        r"weights: expected .* multiple of 32",
    ),
    "empty": ({"weights": [torch.zeros(3, 0)]}, r"weights: expected .* got \[\(\[3, 0\]"),
    "device": ({"weights": [torch.zeros(3, 32, device=META)]}, "weights: expected .* on the CPU"),
    "inputs differ": (
        {"weights": [torch.zeros(3, 32), torch.zeros(3, 64)]},
        r"weights\[1\]: expected shape \[any, 32\]",
    ),
    "types differ": (
        {"weights": [torch.zeros(3, 32), torch.zeros(3, 32, dtype=torch.bfloat16)]},
        r"weights\[1\]: expected float32, got bfloat16",
    ),
    "bias shape": ({"biases": [torch.zeros(2)]}, r"biases\[0\]: expected shape \[3\], got \[2\]"),
    "bias type": ({"biases": [torch.zeros(3, dtype=HALF)]}, r"biases\[0\]: expected float32, got float16"),
    "bias count": ({"biases": [None, None]}, "biases: expected one for each of 1 weights, got 2"),
    "activation": ({"activation": "tanh"}, r"activation: expected one of \['silu', .* got 'tanh'"),
    "no up": ({"activation": "silu"}, "weights: expected a gate and what it gates, got 1"),
    "features": (
        {"activation": "silu", "weights": [torch.zeros(3, 32), torch.zeros(4, 32)]},
        r"weights\[1\]: expected shape \[3, 32\], got \[4, 32\]",
    ),
    "gated bias": (
        {"activation": "silu", "weights": [torch.zeros(3, 32)] * 2, "biases": [None, torch.zeros(3)]},
        "biases: a gated product has none",
    ),
}


@pytest.mark.parametrize(("bad", "message"), BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
def test_bad_weights_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedWeight(**{"weights": [torch.zeros(3, 32)], **bad})


def test_is_packable_accepts_what_packed_weight_takes() -> None:
    assert is_packable(torch.zeros(3, 33))
    assert not is_packable(torch.zeros(3, 33, dtype=torch.bfloat16))
    assert not is_packable(torch.zeros(33))
    assert not is_packable(torch.zeros(0, 32))
    assert not is_packable(torch.zeros(3, 32, device=META))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("x", torch.zeros(2, 31), r"x: expected shape \[2, 32\], got \[2, 31\]"),
        ("x", torch.tensor(1.0), r"x: expected shape \[32\], got \[\]"),
        ("x", torch.zeros(2, 32, dtype=HALF), "x: expected float32, got float16"),
        ("x", torch.zeros(2, 32, device=META), "x: expected on cpu, got meta"),
        ("residual", torch.zeros(3), r"residual: expected shape \[2, 3\], got \[3\]"),
        ("residual", torch.zeros(2, 3, dtype=torch.bfloat16), "residual: expected float32, got bfloat16"),
        ("residual", torch.zeros(2, 3, device=META), "residual: expected on cpu, got meta"),
    ],
)
def test_bad_inputs_of_a_product_are_refused(name: str, tensor: torch.Tensor, message: str) -> None:
    arguments = {"x": torch.zeros(2, 32), "residual": torch.zeros(2, 3)}
    with pytest.raises(ValueError, match=message):
        PackedWeight([torch.zeros(3, 32)]).multiply(**{**arguments, name: tensor})


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.ones(2, 8, dtype=HALF), torch.ones(8), "x: expected float32 or bfloat16, got float16"),
        (torch.ones(2, 8, device=META), torch.ones(8), "x: expected on cpu, got meta"),
        (torch.ones(2, 8), torch.ones(7), r"weight: expected shape \[8\], got \[7\]"),
        (torch.ones(2, 8), torch.ones(0), r"weight: expected shape \[8\], got \[0\]"),
        (torch.ones(2, 8), torch.ones(8, dtype=torch.bfloat16), "weight: expected float32, got bfloat16"),
        (torch.ones(2, 8), torch.ones(16)[::2], "weight: expected a contiguous tensor, .* strides"),
        (torch.ones(2, 8), torch.ones(8, device=META), "weight: expected on cpu, got meta"),
    ],
)
def test_bad_inputs_of_a_norm_are_refused(x: torch.Tensor, weight: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rms_norm(x, weight, 1e-5)
    if not x.is_meta:
        rows = x.view(2, 1, 8)
        with pytest.raises(ValueError, match=message):
            rms_norm(rows, weight, 1e-5, out=rows)
        assert (x == 1).all()


def test_the_norm_of_a_single_number() -> None:
    with pytest.raises(ValueError, match=r"x: expected shape \[any\], got \[\]"):
        rms_norm(torch.tensor(5.0), torch.ones(0), 1e-5)


def test_norms_in_place() -> None:
    x, weight = torch.ones(2, 3, 8), torch.ones(8)
    with pytest.raises(ValueError, match="out: expected x itself or None, got another tensor"):
        rms_norm(x, weight, 1e-5, out=torch.empty_like(x))
    flat = x.flatten(0, 1)
    with pytest.raises(ValueError, match=r"x: expected shape \[any, any, any\], got \[6, 8\]"):
        rms_norm(flat, weight, 1e-5, out=flat)
    turned = x.transpose(0, 1)
    with pytest.raises(ValueError, match="x: expected the last 2 dimensions contiguous"):
        rms_norm(turned, weight, 1e-5, out=turned)
    repeated = x[:1].expand(5, 3, 8)
    with pytest.raises(ValueError, match="x: expected rows at least 24 apart, got 0"):
        rms_norm(repeated, weight, 1e-5, out=repeated)
    assert (x == 1).all()


def rope_arguments() -> dict[str, torch.Tensor]:
    query, key = torch.ones(2, 6, 8).split((4, 2), dim=1)
    return {"query": query, "key": key, "cos": torch.zeros(2, 8), "sin": torch.zeros(2, 8)}


BAD_ROPES = {
    "query type": ("query", torch.ones(2, 4, 8, dtype=HALF), "query: expected float32 or bfloat16"),
    "query rank": ("query", torch.ones(2, 8), r"query: expected shape \[any, any, any\]"),
    "query strides": ("query", torch.ones(2, 8, 6).transpose(1, 2)[:, :4], "query: expected the last 2 dimensions"),
    "key type": ("key", torch.ones(2, 2, 8, dtype=HALF), "key: expected float32, got float16"),
    "key rows": ("key", torch.ones(3, 2, 8), r"key: expected shape \[2, any, 8\], got \[3, 2, 8\]"),
    "row strides": ("key", torch.ones(2, 2, 8), "key: expected rows 48 apart as the query's are, got 16"),
    "cos type": ("cos", torch.zeros(2, 8, dtype=torch.bfloat16), "cos: expected float32, got bfloat16"),
    "cos rows": ("cos", torch.zeros(1, 8), r"cos: expected shape \[2, any\], got \[1, 8\]"),
    "cos rank": ("cos", torch.zeros(2, 1, 8), r"cos: expected shape \[2, any\], got \[2, 1, 8\]"),
    "sin": ("sin", torch.zeros(2, 6), r"sin: expected shape \[2, 8\], got \[2, 6\]"),
    "device": ("sin", torch.zeros(2, 8, device=META), "sin: expected on cpu, got meta"),
}


@pytest.mark.parametrize(("name", "tensor", "message"), BAD_ROPES.values(), ids=BAD_ROPES)
def test_bad_rotary_positions_are_refused(name: str, tensor: torch.Tensor, message: str) -> None:
    arguments = rope_arguments()
    with pytest.raises(ValueError, match=message):
        rope_(**{**arguments, name: tensor})
    assert (arguments["query"] == 1).all()
    assert (arguments["key"] == 1).all()


@pytest.mark.parametrize(("query_heads", "kv_heads", "name"), [(4, 2, "query"), (2, 4, "key")])
def test_rotating_rows_that_overlap_is_refused(query_heads: int, kv_heads: int, name: str) -> None:
    x, positions = torch.ones(8, 8), torch.zeros(3, 8)
    query, key = (x.as_strided((3, heads, 8), (16, 8, 1)) for heads in (query_heads, kv_heads))
    with pytest.raises(ValueError, match=f"{name}: expected rows at least 32 apart, got 16"):
        rope_(query, key, positions, positions)
    assert (x == 1).all()


@pytest.mark.parametrize("rotary_dim", [7, 10])
def test_more_rotary_dimensions_than_heads_have_are_refused(rotary_dim: int) -> None:
    positions = dict.fromkeys(("cos", "sin"), torch.zeros(2, rotary_dim))
    with pytest.raises(ValueError, match=r"cos: expected an even number of dimensions up to 8, got \[2, "):
        rope_(**rope_arguments() | positions)


BAD_WRITES = {
    "key rank": ("key", torch.ones(2, 8), r"key: expected shape \[any, any, any\], got \[2, 8\]"),
    "key strides": ("key", torch.ones(2, 8, 3).transpose(1, 2), "key: expected the last 1 dimensions contiguous"),
    "value rows": ("value", torch.ones(1, 3, 4), r"value: expected shape \[2, 3, any\], got \[1, 3, 4\]"),
    "value type": ("value", torch.ones(2, 3, 4, dtype=HALF), "value: expected float32, got float16"),
    "keys dim": ("keys", torch.zeros(5, 16, 3, 4), r"keys: expected shape \[5, 16, 3, 8\], got \[5, 16, 3, 4\]"),
    "keys heads": ("keys", torch.zeros(5, 16, 2, 8), r"keys: expected shape \[5, 16, 3, 8\], got \[5, 16, 2, 8\]"),
    "keys type": ("keys", torch.zeros(5, 16, 3, 8, dtype=HALF), "keys: expected float32, got float16"),
    "keys strides": ("keys", torch.zeros(5, 3, 16, 8).transpose(1, 2), "keys: expected a contiguous tensor"),
    "keys device": ("keys", torch.zeros(5, 16, 3, 8, device=META), "keys: expected on cpu, got meta"),
    "values slots": (
        "values",
        torch.zeros(4, 16, 3, 4),
        r"values: expected shape \[5, 16, 3, 4\], got \[4, 16, 3, 4\]",
    ),
    "slots": ("slots", torch.zeros(3, dtype=torch.int64), r"slots: expected shape \[2\], got \[3\]"),
    "slots type": ("slots", torch.zeros(2, dtype=torch.int32), "slots: expected int64, got int32"),
    "slots strides": ("slots", torch.zeros(4, dtype=torch.int64)[::2], "slots: expected a contiguous tensor"),
}


@pytest.mark.parametrize(("name", "tensor", "message"), BAD_WRITES.values(), ids=BAD_WRITES)
def test_bad_cache_writes_are_refused(name: str, tensor: torch.Tensor, message: str) -> None:
    arguments = {
        "key": torch.ones(2, 3, 8),
        "value": torch.ones(2, 3, 4),
        "keys": torch.zeros(5, 16, 3, 8),
        "values": torch.zeros(5, 16, 3, 4),
        "slots": torch.tensor([7, 3]),
    }
    with pytest.raises(ValueError, match=message):
        write_cache(**{**arguments, name: tensor})
    assert not arguments["keys"].any()
    assert not arguments["values"].any()


def ints(*numbers: Any, dtype: type = np.int64) -> np.ndarray:
    return np.array(numbers, dtype=dtype)


def plan() -> dict[str, Any]:
    return {
        "row_ranges": ints([0, 1], [1, 2]),
        "tables": ints(0, 1),
        "key_ranges": ints([0, 0], [4, 20]),
        "block_ids": ints([0, 1], [2, 3], dtype=np.int32),
        "positions": ints(3, 19),
        "block_size": 16,
        "kinds": ints(1, 2, dtype=np.int8),
    }


BAD_PLANS = {
    "rows type": (
        "row_ranges",
        ints([0, 1], [1, 2], dtype=np.int32),
        r"row_ranges: expected int64 \[2, 2\], got int32",
    ),
    "rows shape": ("row_ranges", ints([0, 1]), r"row_ranges: expected int64 \[2, 2\], got int64 \[1, 2\]"),
    "rows beyond": ("row_ranges", ints([0, 1], [1, 3]), "row_ranges: expected 0 to 2, got 0 to 3"),
    "rows before": ("row_ranges", ints([-1, 1], [1, 2]), "row_ranges: expected 0 to 2, got -1 to 2"),
    "tables type": ("tables", ints(0, 1, dtype=np.int32), r"tables: expected int64 \[2\], got int32"),
    "tables beyond": ("tables", ints(0, 2), "tables: expected 0 to 1, got 0 to 2"),
    "keys shape": ("key_ranges", ints([0], [4]), r"key_ranges: expected int64 \[2, 2\], got int64 \[2, 1\]"),
    "keys beyond": ("key_ranges", ints([0, 0], [4, 33]), "key_ranges: expected 0 to 32, got 0 to 33"),
    "positions type": ("positions", ints(3, 19, dtype=np.int32), r"positions: expected int64 \[2\], got int32"),
    "ids type": ("block_ids", ints([0, 1], [2, 3]), r"block_ids: expected int32 \[2, 2\], got int64"),
    "ids shape": ("block_ids", ints(0, 1, dtype=np.int32), r"block_ids: expected int32 \[2, 1\], got int32 \[2\]"),
    "kinds type": ("kinds", ints(0, 1), r"kinds: expected int8 \[2\], got int64 \[2\]"),
    "kinds shape": ("kinds", ints(0, dtype=np.int8), r"kinds: expected int8 \[2\], got int8 \[1\]"),
    "kinds beyond": ("kinds", ints(0, 3, dtype=np.int8), "kinds: expected 0 to 2, got 0 to 3"),
    "kinds before": ("kinds", ints(-1, 2, dtype=np.int8), "kinds: expected 0 to 2, got -1 to 2"),
    "block size": ("block_size", 0, "block_size: expected at least 1, got 0"),
}


@pytest.mark.parametrize(("name", "value", "message"), BAD_PLANS.values(), ids=BAD_PLANS)
def test_bad_plans_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedAttention(**{**plan(), name: value})


BAD_ATTENTION: dict[str, tuple[str, Any, str]] = {
    "query rank": ("query", torch.zeros(2, 8), r"query: expected shape \[2, any, 8\], got \[2, 8\]"),
    "query rows": ("query", torch.zeros(3, 4, 8), r"query: expected shape \[2, any, 8\], got \[3, 4, 8\]"),
    "query heads": (
        "query",
        torch.zeros(2, 3, 8),
        r"query: expected a multiple of the cache's 2 heads, got \[2, 3, 8\]",
    ),
    "query dim": ("query", torch.zeros(2, 4, 9), r"query: expected shape \[2, any, 8\]"),
    "query type": ("query", torch.zeros(2, 4, 8, dtype=torch.bfloat16), "query: expected float32, got bfloat16"),
    "query strides": (
        "query",
        torch.zeros(2, 8, 4).transpose(1, 2),
        "query: expected the last 1 dimensions contiguous",
    ),
    "query device": ("query", torch.zeros(2, 4, 8, device=META), "query: expected on cpu, got meta"),
    "keys type": ("keys", torch.zeros(5, 16, 2, 8, dtype=HALF), "keys: expected float32 or bfloat16, got float16"),
    "keys rank": ("keys", torch.zeros(80, 2, 8), r"keys: expected shape \[any, 16, any, any\], got \[80, 2, 8\]"),
    "keys block size": (
        "keys",
        torch.zeros(5, 8, 2, 8),
        r"keys: expected shape \[any, 16, any, any\], got \[5, 8, 2, 8\]",
    ),
    "keys strides": ("keys", torch.zeros(5, 2, 16, 8).transpose(1, 2), "keys: expected a contiguous tensor"),
    "values blocks": (
        "values",
        torch.zeros(4, 16, 2, 4),
        r"values: expected shape \[5, 16, 2, any\], got \[4, 16, 2, 4\]",
    ),
    "values type": ("values", torch.zeros(5, 16, 2, 4, dtype=HALF), "values: expected float32, got float16"),
    "sinks shape": ("sinks", torch.zeros(3), r"sinks: expected shape \[4\], got \[3\]"),
    "sinks type": ("sinks", torch.zeros(4, dtype=torch.bfloat16), "sinks: expected float32, got bfloat16"),
    "sinks strides": ("sinks", torch.zeros(8)[::2], "sinks: expected a contiguous tensor"),
    "sinks device": ("sinks", torch.zeros(4, device=META), "sinks: expected on cpu, got meta"),
    "window": ("window", 0, "window and softcap: expected at least 1 and a finite .* or None, got 0 and None"),
    "softcap": ("softcap", -1.0, "window and softcap: expected .* got None and -1.0"),
}


@pytest.mark.parametrize(("name", "value", "message"), BAD_ATTENTION.values(), ids=BAD_ATTENTION)
def test_bad_inputs_of_attention_are_refused(name: str, value: Any, message: str) -> None:
    arguments = {
        "query": torch.zeros(2, 4, 8),
        "keys": torch.zeros(5, 16, 2, 8),
        "values": torch.zeros(5, 16, 2, 4),
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        PagedAttention(**plan()).attend(**{**arguments, name: value})


def test_a_cache_without_heads_is_refused() -> None:
    """It must not end in a division by zero."""
    empty = torch.zeros(5, 16, 0, 8)
    with pytest.raises(ValueError, match="query: expected a multiple of the cache's 0 heads"):
        PagedAttention(**plan()).attend(torch.zeros(2, 4, 8), empty, empty, scale=1.0)
    whole = torch.zeros(5, 16, 2, 8)
    with pytest.raises(ValueError, match=r"query: expected a multiple of the cache's 2 heads, got \[2, 0, 8\]"):
        PagedAttention(**plan()).attend(torch.zeros(2, 0, 8), whole, whole, scale=1.0)


def test_heads_without_dimensions_are_refused() -> None:
    """All scores would be 0."""
    keys, values = torch.zeros(5, 16, 2, 0), torch.zeros(5, 16, 2, 4)
    with pytest.raises(ValueError, match=r"keys: expected at least one dimension of a head, got shape \[5, 16, 2, 0\]"):
        PagedAttention(**plan()).attend(torch.zeros(2, 4, 0), keys, values, scale=1.0)


def test_strides_of_single_entries_do_not_matter() -> None:
    """torch leaves such strides as they come: for one head, or one dimension."""
    x = torch.randn(2, 1, 8).as_strided((2, 1, 8), (8, 3, 1))
    rms_norm(x, torch.ones(8), 1e-5, out=x)
    rope_(x, x.clone().as_strided((2, 1, 8), (8, 5, 1)), torch.ones(2, 8), torch.zeros(2, 8))
    one = torch.randn(2, 3, 1).as_strided((2, 3, 1), (3, 1, 7))
    keys = torch.zeros(5, 16, 3, 1)
    write_cache(one, one, keys, keys.clone(), torch.tensor([7, 3]))
    assert torch.equal(keys.flatten(0, 1)[[7, 3]], one)
