"""The launchers' checks before a kernel sees a pointer: a wrong shape is a Python error, never an illegal access.

The contents of tensors on the device are not checked, since that would wait for the device: the rows, tables and partial
results of items, block ids in tables, positions, slots, starts. The caller is responsible for them.

Kernels count entries in 32 bits and multiply them by strides in 64. Only offsets within a block of a cache are 32 bits: 64
would take registers from the innermost loop.
"""

from __future__ import annotations

import torch

from radixkv_kernels.checked_once import checked_once

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
CACHE_DTYPES = (*FLOATS, torch.float8_e4m3fn)
BLOCK_SIZES = (16, 32, 64)
"""Tokens per block that the kernels accept."""
MAX_HEAD_DIM = 256

# The most programs in a grid's first dimension, and in each other one.
MAX_PROGRAMS = 2**31 - 1
MAX_PROGRAMS_ACROSS = 65_535

# So that the index of any row of a last, half empty tile is still an int32.
_MAX_SIZE = 2**31 - 1024
_MAX_INT32 = 2**31 - 1


def check_device(name: str, device: torch.device) -> None:
    """Refuse any device but the one that a launch goes to.

    Raises:
        ValueError: names the tensor and its device.
    """
    if device.type not in ("cuda", "cpu"):  # the latter in the interpreter; otherwise Triton itself refuses it
        raise ValueError(f"{name}: expected on a CUDA device, got {device}")
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ValueError(f"{name}: expected on the current device, cuda:{torch.cuda.current_device()}, got {device}")


def check_at_most(name: str, what: str, count: int, limit: int = MAX_PROGRAMS_ACROSS) -> None:
    """Refuse more programs than a grid can have.

    Raises:
        ValueError: names the tensor, the limit and what was given.
    """
    if count > limit:
        raise ValueError(f"{name}: expected at most {limit} {what}, got {count}")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Refuse a tensor of another rank, size (None: any), type or device, or whose last dimension is not contiguous.

    Also refuse one that autograd tracks: a kernel's result would silently have no gradient.

    Raises:
        ValueError: names the tensor, what was expected and what was given.
    """
    expected = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
    given = list(tensor.shape)
    if len(given) != len(shape) or any(size not in (None, own) for size, own in zip(shape, given, strict=True)):
        raise ValueError(f"{name}: expected shape {expected}, got {given}")
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: expected {names}, got {str(tensor.dtype).removeprefix('torch.')}")
    if tensor.device != device:
        raise ValueError(f"{name}: expected on {device}, got {tensor.device}")
    if given and given[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: the last dimension must be contiguous, got strides {list(tensor.stride())}")
    if max(given, default=0) > _MAX_SIZE:
        raise ValueError(f"{name}: expected at most {_MAX_SIZE} entries in a dimension, got {given}")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: expected no gradient to be asked for; call under torch.no_grad()")


def check_written(name: str, tensor: torch.Tensor) -> None:
    """Refuse an output tensor two of whose entries may share memory: which of them is kept would be chance.

    Raises:
        ValueError: with the strides that were given.
    """
    if tensor.is_contiguous():
        return
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < extent:
                raise ValueError(
                    f"{name}: expected memory of its own for every entry, got strides {list(tensor.stride())}"
                )
            extent += (size - 1) * stride


def check_tables(tables: torch.Tensor, num_rows: int, device: torch.device) -> None:
    """Refuse block tables that are not ``[tables, blocks]``, or in which no row could find a block.

    Raises:
        ValueError: with the shape that was given.
    """
    check_tensor("tables", tables, (None, None), (torch.int32,), device)
    if num_rows and not tables.numel():
        raise ValueError(f"tables: expected at least one block for {num_rows} rows, got {list(tables.shape)}")


def check_cache(key_cache: torch.Tensor, value_cache: torch.Tensor, device: torch.device) -> None:
    """Refuse caches that do not belong together, or whose blocks, heads, element type or strides the kernels cannot take.

    Blocks may lie anywhere, but a block's own entries must lie within 2**31 elements; in a large cache with the heads
    outermost, for instance, they do not.

    Raises:
        ValueError: with the shape that was given.
    """
    check_tensor("key_cache", key_cache, (None, None, None, None), CACHE_DTYPES, device)
    num_blocks, block_size, num_kv_heads, _ = key_cache.shape
    check_tensor("value_cache", value_cache, (num_blocks, block_size, num_kv_heads, None), (key_cache.dtype,), device)
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"key_cache: expected blocks of {BLOCK_SIZES} tokens, got shape {list(key_cache.shape)}")
    if num_blocks < 1 or num_kv_heads < 1:
        raise ValueError(f"key_cache: expected at least one block and one head, got {list(key_cache.shape)}")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        dim = cache.shape[3]
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"{name}: expected a head size of 1 to {MAX_HEAD_DIM}, got {dim}")
        _, slot_stride, head_stride, _ = cache.stride()
        if (block_size - 1) * slot_stride + (num_kv_heads - 1) * head_stride + dim - 1 > _MAX_INT32:
            raise ValueError(
                f"{name}: expected a block's entries within 2**31 elements, got strides {list(cache.stride())}"
            )


def check_query(query: torch.Tensor, key_cache: torch.Tensor, max_group: int) -> None:
    """Refuse a query ``[rows, query heads, key dim]`` that does not belong to the cache.

    Raises:
        ValueError: with the shapes that were given.
    """
    num_kv_heads, key_dim = key_cache.shape[2:]
    check_tensor("query", query, (None, None, key_dim), FLOATS, query.device)
    num_heads = query.shape[1]
    if num_heads % num_kv_heads or not 1 <= num_heads // num_kv_heads <= max_group:
        raise ValueError(
            f"query: expected heads that are 1 to {max_group} times the cache's {num_kv_heads}, got {list(query.shape)}"
        )
    if key_cache.dtype not in (query.dtype, torch.float8_e4m3fn):
        raise ValueError(f"key_cache: expected the query's {query.dtype} or float8_e4m3fn, got {key_cache.dtype}")


def check_scales(
    name: str, scales: torch.Tensor | None, num_kv_heads: int, cache_dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse scales without a quantised cache, or a quantised cache without scales.

    Raises:
        ValueError: with what is missing or superfluous.
    """
    if (scales is not None) != (cache_dtype == torch.float8_e4m3fn):
        raise ValueError(f"{name}: expected exactly for a float8_e4m3fn cache, got {scales} with {cache_dtype}")
    if scales is not None:
        check_tensor(name, scales, (num_kv_heads,), (torch.float32,), device)


@checked_once
def check_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    output: torch.Tensor,
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    *,
    max_group: int,
    window: int | None,
    sinks: torch.Tensor | None,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> None:
    """Refuse arguments of `attend_items` that no attention kernel takes.

    Raises:
        ValueError: with what was given.
    """
    device = query.device
    check_device("query", device)
    check_cache(key_cache, value_cache, device)
    check_query(query, key_cache, max_group)
    num_rows, num_heads, _ = query.shape
    num_kv_heads, value_dim = value_cache.shape[2:]
    check_tables(tables, num_rows, device)
    check_tensor("positions", positions, (num_rows,), (torch.int32,), device)
    check_tensor("output", output, (num_rows, num_heads, value_dim), (query.dtype,), device)
    check_tensor("partial_output", partial_output, (None, num_heads, value_dim), (torch.float32,), device)
    check_tensor("partial_lse", partial_lse, (partial_output.shape[0], num_heads), (torch.float32,), device)
    for name, written in (("output", output), ("partial_output", partial_output), ("partial_lse", partial_lse)):
        check_written(name, written)
    if sinks is not None:
        check_tensor("sinks", sinks, (num_heads,), FLOATS, device)
    check_scales("key_scales", key_scales, num_kv_heads, key_cache.dtype, device)
    check_scales("value_scales", value_scales, num_kv_heads, key_cache.dtype, device)
    if window is not None and window < 1:
        raise ValueError(f"window: expected at least 1, got {window}")
