"""What kernels cannot take is refused before anything is launched, with an error that shows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radixkv_kernels import (
    BlockCopier,
    advance_rows,
    attend_items,
    attend_split,
    draw_tokens,
    draw_truncated,
    merge_partials,
    merge_splits,
    write_cache,
)
from radixkv_kernels.checked_once import checked_once
from radixkv_kernels.checks import check_cache, check_device


def test_the_same_layout_is_checked_once_and_any_other_again() -> None:
    """All layers of a batch launch the same kernels on other tensors of the same shapes."""
    looked_at: list[str] = []

    @checked_once
    def check(name: str, *, query: torch.Tensor, limit: int | None) -> None:
        looked_at.append(name)
        if query.shape[0] > 4:
            raise ValueError("too large")

    for _ in range(3):
        check("first", query=torch.zeros(4, 6), limit=None)
    assert looked_at == ["first"]
    others: list[tuple[torch.Tensor, int | None]] = [
        (torch.zeros(3, 6), None),
        (torch.zeros(6, 4).T, None),
        (torch.zeros(4, 6, dtype=torch.float16), None),
        (torch.zeros(4, 6, device="meta"), None),
        (torch.zeros(4, 6, requires_grad=True), None),
        (torch.zeros(4, 6), 1),
    ]
    for query, limit in others:
        check("first", query=query, limit=limit)
    assert len(looked_at) == 1 + len(others)
    with torch.no_grad():  # of which it depends whether a gradient matters
        check("first", query=torch.zeros(4, 6), limit=None)
    assert len(looked_at) == 2 + len(others)
    for _ in range(2):
        with pytest.raises(ValueError, match="too large"):
            check("first", query=torch.zeros(5, 6), limit=None)


def test_what_is_remembered_is_bounded() -> None:
    looked_at: list[int] = []

    @checked_once
    def check(number: int) -> None:
        looked_at.append(number)

    for number in range(5000):
        check(number)
    check(0)
    assert looked_at == [*range(5000), 0]
    check(0)
    assert len(looked_at) == 5001


ROW_TABLES = torch.zeros(3, dtype=torch.int32)


def attention_arguments() -> dict[str, Any]:
    return {
        "query": torch.zeros(3, 4, 64),
        "key_cache": torch.zeros(5, 16, 2, 64),
        "value_cache": torch.zeros(5, 16, 2, 32),
        "tables": torch.zeros(3, 2, dtype=torch.int32),
        "positions": torch.zeros(3, dtype=torch.int32),
        "output": torch.zeros(3, 4, 32),
        "partial_output": torch.zeros(6, 4, 32),
        "partial_lse": torch.zeros(6, 4),
        "scale": 1.0,
    }


BAD_ATTENTION = {
    "rank": ("query", torch.zeros(3, 64), r"query: expected shape \[any, any, 64\], got \[3, 64\]"),
    "head size": ("query", torch.zeros(3, 4, 32), r"query: expected shape"),
    "heads": ("query", torch.zeros(3, 5, 64), r"query: expected heads that are 1 to .* got \[3, 5, 64\]"),
    "group": ("query", torch.zeros(3, 512, 64), r"query: expected heads that are 1 to"),
    "query type": ("query", torch.zeros(3, 4, 64, dtype=torch.float64), "query: expected float32"),
    "query strides": ("query", torch.zeros(3, 64, 4).transpose(1, 2), "query: the last dimension must be contiguous"),
    "device": ("key_cache", torch.zeros(5, 16, 2, 64, device="meta"), "key_cache: expected on cpu, got meta"),
    "block size": ("key_cache", torch.zeros(5, 8, 2, 64), "value_cache: expected shape"),
    "cache type": ("key_cache", torch.zeros(5, 16, 2, 64, dtype=torch.float16), "value_cache: expected float16"),
    "cache strides": ("key_cache", torch.zeros(5, 16, 64, 2).transpose(2, 3), "key_cache: the last dimension"),
    "tables": ("tables", torch.zeros(3, 2, dtype=torch.int64), "tables: expected int32, got int64"),
    "positions": ("positions", torch.zeros(2, dtype=torch.int32), r"positions: expected shape \[3\], got \[2\]"),
    "output": ("output", torch.zeros(3, 4, 64), r"output: expected shape \[3, 4, 32\]"),
    "partials": ("partial_output", torch.zeros(6, 4, 32, dtype=torch.float16), "partial_output: expected float32"),
    "lse": ("partial_lse", torch.zeros(5, 4), r"partial_lse: expected shape \[6, 4\], got \[5, 4\]"),
    "sinks": ("sinks", torch.zeros(3), r"sinks: expected shape \[4\], got \[3\]"),
    "scale": ("scale", 0.0, r"scale: expected a number above 0, got 0\.0"),
    "softcap": ("softcap", -30.0, r"softcap: expected a number above 0, got -30\.0"),
    "window": ("window", 0, "window: expected at least 1, got 0"),
    "no table": (
        "tables",
        torch.zeros(3, 0, dtype=torch.int32),
        r"tables: expected at least one block .* got \[3, 0\]",
    ),
    "output overlaps": ("output", torch.zeros(3, 1, 32).expand(3, 4, 32), r"output: expected memory .* \[32, 0, 1\]"),
    "partials overlap": (
        "partial_output",
        torch.zeros(768).as_strided((6, 4, 32), (128, 31, 1)),
        "partial_output: expected mem",
    ),
    "lse overlaps": ("partial_lse", torch.zeros(1, 4).expand(6, 4), r"partial_lse: expected memory .* \[0, 1\]"),
    "gradient": ("query", torch.zeros(3, 4, 64, requires_grad=True), "query: expected no gradient"),
    "size": (
        "tables",
        torch.zeros(1, 2, dtype=torch.int32).expand(2**31, 2),
        "tables: expected at most 2147482624 entries",
    ),
    "scales": ("key_scales", torch.ones(2), "key_scales: expected exactly for a float8"),
}


@pytest.mark.parametrize(("name", "value", "message"), BAD_ATTENTION.values(), ids=BAD_ATTENTION)
def test_attention_refuses(name: str, value: Any, message: str) -> None:
    arguments = attention_arguments() | {name: value}
    with pytest.raises(ValueError, match=message):
        attend_split(**arguments, row_tables=ROW_TABLES, num_splits=2)
    with pytest.raises(ValueError, match=message):
        attend_items(**arguments, items=torch.zeros(1, 6, dtype=torch.int32), tile_rows=128)


# Strides of a block's slots or heads, its last entry 2**31 elements from the first. Nothing lies in their memory.
FAR = torch.empty(2**32, dtype=torch.float8_e4m3fn, device="meta")
BAD_CACHES = {
    "no block": (torch.zeros(0, 16, 2, 64), r"expected at least one block and one head, got \[0, 16, 2, 64\]"),
    "no head": (torch.zeros(5, 16, 0, 64), r"expected at least one block and one head, got \[5, 16, 0, 64\]"),
    "far slots": (
        FAR.as_strided((5, 16, 2, 64), (128, 2**31 // 15 + 1, 64, 1)),
        r"expected a block's entries within 2\*\*31",
    ),
    "far heads": (FAR.as_strided((5, 16, 2, 64), (1024, 64, 2**31 - 1023, 1)), r"expected a block's entries within"),
}


@pytest.mark.parametrize(("cache", "message"), BAD_CACHES.values(), ids=BAD_CACHES)
def test_bad_caches_are_refused(cache: torch.Tensor, message: str) -> None:
    """With nothing in a tensor, or with strides too large for 32 bits."""
    with pytest.raises(ValueError, match=f"key_cache: {message}"):
        check_cache(cache, cache, cache.device)
    if cache.numel():
        good = torch.empty(5, 16, 2, 64, dtype=cache.dtype, device=cache.device)
        with pytest.raises(ValueError, match=f"value_cache: {message}"):
            check_cache(good, cache, cache.device)


def test_unsupported_block_sizes_are_refused() -> None:
    caches = {"key_cache": torch.zeros(5, 8, 2, 64), "value_cache": torch.zeros(5, 8, 2, 32)}
    with pytest.raises(ValueError, match=r"key_cache: expected blocks of .* got shape \[5, 8, 2, 64\]"):
        attend_split(**attention_arguments() | caches, row_tables=ROW_TABLES, num_splits=1)


def test_float8_caches_need_scales() -> None:
    caches = {name: attention_arguments()[name].to(torch.float8_e4m3fn) for name in ("key_cache", "value_cache")}
    with pytest.raises(ValueError, match="key_scales: expected exactly for a float8"):
        attend_split(**attention_arguments() | caches, row_tables=ROW_TABLES, num_splits=1)


def test_bad_items_tiles_and_splits_are_refused() -> None:
    items = torch.zeros(1, 6, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"tile_rows: expected one of \(16, 64, 128\), got 32"):
        attend_items(**attention_arguments(), items=items, tile_rows=32)
    with pytest.raises(ValueError, match=r"items: expected shape \[any, 6\], got \[1, 5\]"):
        attend_items(**attention_arguments(), items=items[:, :5], tile_rows=16)
    with pytest.raises(ValueError, match=r"items: expected a contiguous tensor, got strides \[0, 1\]"):
        attend_items(**attention_arguments(), items=items.expand(2, 6), tile_rows=16)
    with pytest.raises(ValueError, match="num_splits: expected at least 1, got 0"):
        attend_split(**attention_arguments(), row_tables=ROW_TABLES, num_splits=0)
    with pytest.raises(ValueError, match=r"partial_output: expected 4 for each of 3 rows, got \[6, 4, 32\]"):
        attend_split(**attention_arguments(), row_tables=ROW_TABLES, num_splits=4)
    with pytest.raises(ValueError, match=r"row_tables: expected shape \[3\], got \[2\]"):
        attend_split(**attention_arguments(), row_tables=ROW_TABLES[:2], num_splits=1)


def test_more_programs_than_a_grid_can_have_are_refused() -> None:
    many = 65_536
    arguments = attention_arguments()
    with pytest.raises(ValueError, match="num_splits: expected at most 65535 parts, got 65536"):
        attend_split(**arguments, row_tables=ROW_TABLES, num_splits=many)
    rows = {
        "query": torch.zeros(1, 4, 64).expand(many, 4, 64),
        "output": torch.zeros(many, 4, 32),
        "positions": torch.zeros(many, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match="query: expected at most 65535 rows, got 65536"):
        attend_split(**arguments | rows, row_tables=rows["positions"], num_splits=1)
    with pytest.raises(ValueError, match="output: expected at most 65535 heads, got 65536"):
        merge_splits(torch.zeros(1, many, 1), torch.zeros(1, many), torch.zeros(1, many, 1), num_splits=1)
    caches = torch.zeros(1, 16, many, 1), torch.zeros(1, 16, many, 1)
    with pytest.raises(ValueError, match="key_cache: expected at most 65535 heads, got 65536"):
        write_cache(torch.zeros(0, many, 1), torch.zeros(0, many, 1), *caches, torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="caches: expected at most 65535 tensors, got 65536"):
        BlockCopier([torch.zeros(1, 16, 1, 1)] * many)
    # A program for each item and head.
    heads, items = 2**15, torch.zeros(2**16, 6, dtype=torch.int32)
    wide = {name: torch.zeros(3, heads, 1) for name in ("query", "output", "partial_output")}
    wide |= {name: torch.zeros(1, 16, heads, 1) for name in ("key_cache", "value_cache")}
    wide |= {"partial_lse": torch.zeros(3, heads)}
    with pytest.raises(ValueError, match="items: expected at most 65535 for 32768 heads, got 65536"):
        attend_items(**arguments | wide, items=items, tile_rows=16)


def test_tensors_on_another_device_are_refused() -> None:
    with pytest.raises(ValueError, match="query: expected on a CUDA device, got meta"):
        attend_items(
            **{key: value.to("meta") if key != "scale" else value for key, value in attention_arguments().items()},
            items=torch.zeros(1, 6, dtype=torch.int32, device="meta"),
            tile_rows=16,
        )
    copier = BlockCopier([torch.zeros(4, 16, 2, 64, device="meta")])
    with pytest.raises(ValueError, match="copies: expected on a CUDA device, got meta"):
        copier.launch(torch.zeros(1, 3, dtype=torch.int32, device="meta"))
    with pytest.raises(ValueError, match="positions: expected on a CUDA device, got meta"):
        advance_rows(*(tensor.to("meta") for tensor in advance_arguments().values()), block_size=16)


def test_a_gpu_that_the_launch_would_not_go_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    check_device("query", torch.device("cuda", 1))
    with pytest.raises(ValueError, match="query: expected on the current device, cuda:1, got cuda:0"):
        check_device("query", torch.device("cuda", 0))


def test_gradients_that_are_not_asked_for() -> None:
    """As parameters, such as sinks, have them where no gradients are computed."""
    arguments = attention_arguments() | {"sinks": torch.zeros(4, requires_grad=True)}
    with torch.no_grad(), pytest.raises(ValueError, match="num_splits: expected at least 1, got 0"):
        attend_split(**arguments, row_tables=ROW_TABLES, num_splits=0)


def advance_arguments() -> dict[str, torch.Tensor]:
    return {
        "positions": torch.zeros(3, dtype=torch.int32),
        "slots": torch.zeros(3, dtype=torch.int64),
        "tables": torch.zeros(3, 2, dtype=torch.int32),
        "row_tables": torch.zeros(3, dtype=torch.int32),
    }


BAD_ADVANCES = {
    "positions": (torch.zeros(3), "positions: expected int32, got float32"),
    "slots": (torch.zeros(2, dtype=torch.int64), r"slots: expected shape \[3\], got \[2\]"),
    "tables": (torch.zeros(0, 2, dtype=torch.int32), r"tables: expected at least one block for 3 rows, got \[0, 2\]"),
    "row_tables": (torch.zeros(6, dtype=torch.int32)[::2], "row_tables: the last dimension must be contiguous"),
}


@pytest.mark.parametrize("name", BAD_ADVANCES)
def test_advancing_refuses(name: str) -> None:
    tensor, message = BAD_ADVANCES[name]
    with pytest.raises(ValueError, match=message):
        advance_rows(**advance_arguments() | {name: tensor}, block_size=16)


def test_advancing_by_blocks_of_no_tokens() -> None:
    with pytest.raises(ValueError, match="block_size: expected at least 1, got 0"):
        advance_rows(**advance_arguments(), block_size=0)


def test_merging_refuses() -> None:
    partials = torch.zeros(6, 4, 32), torch.zeros(6, 4)
    ints = torch.zeros(4, dtype=torch.int32), torch.zeros(6, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    output = torch.zeros(3, 4, 32)
    with pytest.raises(ValueError, match=r"starts: expected shape \[4\], got \[3\]"):
        merge_partials(*partials, ints[0][:3], *ints[1:], output)
    with pytest.raises(ValueError, match="num_splits: expected 1 to as many as 6"):
        merge_splits(*partials, output, num_splits=3)
    with pytest.raises(ValueError, match=r"partial_output: expected shape \[any, 4, 16\]"):
        merge_splits(*partials, output[..., :16], num_splits=2)
    with pytest.raises(ValueError, match=r"output: expected memory of its own .* got strides \[0, 32, 1\]"):
        merge_splits(*partials, output[:1].expand(3, 4, 32), num_splits=2)
    for shape in ((3, 4, 0), (3, 0, 32), (3, 4, 257)):
        with pytest.raises(ValueError, match=r"output: expected at least one head of a size of 1 to 256"):
            merge_splits(*partials, torch.zeros(shape), num_splits=2)


def test_writing_refuses_and_writes_nothing() -> None:
    key, value, slots = torch.ones(3, 2, 64), torch.ones(3, 2, 32), torch.zeros(3, dtype=torch.int64)
    caches = torch.zeros(5, 16, 2, 64), torch.zeros(5, 16, 2, 32)
    with pytest.raises(ValueError, match="slots: expected int64, got int32"):
        write_cache(key, value, *caches, slots.int())
    with pytest.raises(ValueError, match=r"value: expected shape \[3, 2, 32\], got \[2, 2, 32\]"):
        write_cache(key, value[:2], *caches, slots)
    with pytest.raises(ValueError, match="key_cache: expected the key's"):
        write_cache(key.half(), value.half(), *caches, slots)
    with pytest.raises(ValueError, match=r"value_cache: expected memory of its own for every entry, got strides"):
        write_cache(key, value, caches[0], caches[1][:1].expand(5, 16, 2, 32), slots)
    assert not any(cache.any() for cache in caches)


def test_copying_refuses_and_copies_nothing() -> None:
    cache = torch.randn(4, 16, 2, 64)
    before = cache.clone()
    copier = BlockCopier([cache])
    for bad in ((0, 4, 1), (-1, 0, 1), (2, 2, 1), (0, 1, 17), (0, 1, -1)):
        with pytest.raises(ValueError, match="copies: expected"):
            copier.copy([(0, 1, 16), bad])
    assert torch.equal(cache, before)
    with pytest.raises(ValueError, match="caches: expected at least one"):
        BlockCopier([])
    with pytest.raises(ValueError, match=r"caches\[1\]: expected shape \[4, 16, any, any\], got \[5, 16, 2, 64\]"):
        BlockCopier([cache, torch.zeros(5, 16, 2, 64)])
    with pytest.raises(ValueError, match=r"caches\[0\]: expected a contiguous tensor"):
        BlockCopier([cache.transpose(2, 3)[..., :1]])
    with pytest.raises(ValueError, match=r"caches\[0\]: expected tokens of whole 4 bytes"):
        BlockCopier([torch.zeros(4, 16, 1, 3, dtype=torch.float16)])
    with pytest.raises(ValueError, match=r"caches\[0\]: expected shape \[any, any, any, any\], got \[4\]"):
        BlockCopier([torch.zeros(4)])
    with pytest.raises(ValueError, match=r"caches\[0\]: expected blocks of at most 4294967296 bytes"):
        BlockCopier([torch.empty(1, 64, 2**16 + 1, 256)])


def test_drawing_refuses() -> None:
    temperatures, rng_states = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="logits: expected float32, got float16"):
        draw_tokens(torch.zeros(2, 9, dtype=torch.float16), temperatures, rng_states)
    with pytest.raises(ValueError, match=r"logits: expected at least one token, got \[2, 0\]"):
        draw_tokens(torch.zeros(2, 0), temperatures, rng_states)
    with pytest.raises(ValueError, match=r"rng_states: expected shape \[2\], got \[1\]"):
        draw_tokens(torch.zeros(2, 9), temperatures, rng_states[:1])
    left: dict[str, Any] = {"min_p": temperatures, "top_k": torch.ones(2, dtype=torch.int32), "top_p": temperatures}
    for changed, message in (
        ({"min_p": rng_states}, "min_p: expected float32, got int64"),
        ({"top_k": rng_states}, "top_k: expected int32, got int64"),
        ({"top_p": temperatures[:1]}, r"top_p: expected shape \[2\], got \[1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            draw_truncated(torch.zeros(2, 9), temperatures, rng_states, **{**left, **changed})
    with pytest.raises(ValueError, match=r"logits: expected at least one token, got \[2, 0\]"):
        draw_truncated(torch.zeros(2, 0), temperatures, rng_states, **left)
