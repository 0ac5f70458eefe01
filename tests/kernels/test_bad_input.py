"""What kernels cannot take is refused before anything is launched, with what was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radixkv_kernels import (
    BlockCopier,
    attend_items,
    attend_split,
    draw_tokens,
    merge_partials,
    merge_splits,
    write_cache,
)

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
    "scales": ("key_scales", torch.ones(2), "key_scales: expected exactly for a float8"),
}


@pytest.mark.parametrize(("name", "value", "message"), BAD_ATTENTION.values(), ids=BAD_ATTENTION)
def test_attention_refuses(name: str, value: Any, message: str) -> None:
    arguments = attention_arguments() | {name: value}
    with pytest.raises(ValueError, match=message):
        attend_split(**arguments, row_tables=ROW_TABLES, num_splits=2)
    with pytest.raises(ValueError, match=message):
        attend_items(**arguments, items=torch.zeros(1, 6, dtype=torch.int32), tile_rows=128)


def test_blocks_of_a_size_that_kernels_do_not_know() -> None:
    caches = {"key_cache": torch.zeros(5, 8, 2, 64), "value_cache": torch.zeros(5, 8, 2, 32)}
    with pytest.raises(ValueError, match=r"key_cache: expected blocks of .* got shape \[5, 8, 2, 64\]"):
        attend_split(**attention_arguments() | caches, row_tables=ROW_TABLES, num_splits=1)


def test_float8_caches_need_scales() -> None:
    caches = {name: attention_arguments()[name].to(torch.float8_e4m3fn) for name in ("key_cache", "value_cache")}
    with pytest.raises(ValueError, match="key_scales: expected exactly for a float8"):
        attend_split(**attention_arguments() | caches, row_tables=ROW_TABLES, num_splits=1)


def test_items_and_tiles_and_splits() -> None:
    items = torch.zeros(1, 6, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"tile_rows: expected one of \(16, 64, 128\), got 32"):
        attend_items(**attention_arguments(), items=items, tile_rows=32)
    with pytest.raises(ValueError, match=r"items: expected shape \[any, 6\], got \[1, 5\]"):
        attend_items(**attention_arguments(), items=items[:, :5], tile_rows=16)
    with pytest.raises(ValueError, match="items: expected at most 65535, got 65536"):
        attend_items(**attention_arguments(), items=items.expand(65536, 6), tile_rows=16)
    with pytest.raises(ValueError, match="num_splits: expected at least 1, got 0"):
        attend_split(**attention_arguments(), row_tables=ROW_TABLES, num_splits=0)
    with pytest.raises(ValueError, match=r"partial_output: expected 4 for each of 3 rows, got \[6, 4, 32\]"):
        attend_split(**attention_arguments(), row_tables=ROW_TABLES, num_splits=4)
    with pytest.raises(ValueError, match=r"row_tables: expected shape \[3\], got \[2\]"):
        attend_split(**attention_arguments(), row_tables=ROW_TABLES[:2], num_splits=1)


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


def test_writing_refuses_and_writes_nothing() -> None:
    key, value, slots = torch.ones(3, 2, 64), torch.ones(3, 2, 32), torch.zeros(3, dtype=torch.int64)
    caches = torch.zeros(5, 16, 2, 64), torch.zeros(5, 16, 2, 32)
    with pytest.raises(ValueError, match="slots: expected int64, got int32"):
        write_cache(key, value, *caches, slots.int())
    with pytest.raises(ValueError, match=r"value: expected shape \[3, 2, 32\], got \[2, 2, 32\]"):
        write_cache(key, value[:2], *caches, slots)
    with pytest.raises(ValueError, match="key_cache: expected the key's"):
        write_cache(key.half(), value.half(), *caches, slots)
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


def test_drawing_refuses() -> None:
    temperatures, starts = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="logits: expected float32, got float16"):
        draw_tokens(torch.zeros(2, 9, dtype=torch.float16), temperatures, starts)
    with pytest.raises(ValueError, match=r"logits: expected at least one token, got \[2, 0\]"):
        draw_tokens(torch.zeros(2, 0), temperatures, starts)
    with pytest.raises(ValueError, match=r"starts: expected shape \[2\], got \[1\]"):
        draw_tokens(torch.zeros(2, 9), temperatures, starts[:1])
