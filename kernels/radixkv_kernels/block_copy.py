"""Copy-on-write: the first tokens of many blocks, in all layers, in one launch.

The layers' tensors are apart, so the kernel gets their addresses in a table::

    addresses   key cache of layer 0 | value cache of layer 0 | key cache of layer 1 | ...
    grid        (copies, tensors)

Bytes moved: each copied token is read once and written once, ``2 * tokens * bytes per token`` over all layers; the floor on
a GPU of B bytes/s is that over B.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from radixkv_kernels.checks import CACHE_DTYPES, check_at_most, check_device, check_tensor
from radixkv_kernels.target import COMPILE_OPTIONS

_WORDS = 1024
_MAX_BLOCK_BYTES = 2**32  # words are counted in 32 bits


@triton.jit
def _copy_blocks(copies, addresses, token_words, block_words, WORDS: tl.constexpr):
    """One program: one copy in one tensor, as 32-bit words, which every element type fills evenly; grid (copies, tensors).

    ``copies`` is int32 ``[copies, 3]``: source, target, tokens. For each tensor ``addresses`` has an int64, ``token_words``
    an int32, and ``block_words`` an int64, the stride from block to block. All of it is contiguous.
    """
    copy = tl.program_id(0).to(tl.int64)
    tensor = tl.program_id(1)
    source = tl.load(copies + copy * 3).to(tl.int64)
    target = tl.load(copies + copy * 3 + 1).to(tl.int64)
    num_words = tl.load(copies + copy * 3 + 2) * tl.load(token_words + tensor)
    stride = tl.load(block_words + tensor)
    # Blocks begin on 16 bytes (the launcher verifies it), so that words move four at a time.
    base = tl.multiple_of(tl.load(addresses + tensor), 16).to(tl.pointer_type(tl.int32))
    source_words = base + tl.multiple_of(source * stride, 4)
    target_words = base + tl.multiple_of(target * stride, 4)
    for start in tl.range(0, num_words, WORDS):
        word = start + tl.arange(0, WORDS)
        data = tl.load(source_words + word, mask=word < num_words)
        tl.store(target_words + word, data, mask=word < num_words)


class BlockCopier:
    """Copies blocks inside a fixed set of caches.

    Args:
        caches: every layer's key and value cache, ``[num_blocks, block_size, kv heads, dim]``, contiguous, all on one
            device. They must outlive the copier, which keeps their addresses.

    Raises:
        ValueError: a cache is not contiguous, of another length or device, or its blocks are no multiple of 16 bytes, or
            larger than 4 GiB.
    """

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        if not caches:
            raise ValueError("caches: expected at least one tensor, got none")
        self._device = caches[0].device
        check_tensor("caches[0]", caches[0], (None, None, None, None), CACHE_DTYPES, self._device)
        check_at_most("caches", "tensors", len(caches))
        self._num_blocks, self._block_size = caches[0].shape[:2]
        for index, cache in enumerate(caches):
            name = f"caches[{index}]"
            check_tensor(name, cache, (self._num_blocks, self._block_size, None, None), CACHE_DTYPES, self._device)
            if not cache.is_contiguous():
                raise ValueError(f"{name}: expected a contiguous tensor, got strides {list(cache.stride())}")
            token_bytes = cache.shape[2] * cache.shape[3] * cache.element_size()
            if token_bytes % 4 or token_bytes * self._block_size % 16 or cache.data_ptr() % 16:
                raise ValueError(
                    f"{name}: expected tokens of whole 4 bytes in blocks of whole 16, got {token_bytes} bytes per token"
                )
            if token_bytes * self._block_size > _MAX_BLOCK_BYTES:
                raise ValueError(
                    f"{name}: expected blocks of at most {_MAX_BLOCK_BYTES} bytes, got {list(cache.shape)}"
                )
        self._caches = tuple(caches)
        words = [cache.shape[2] * cache.shape[3] * cache.element_size() // 4 for cache in caches]
        self._addresses = torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=self._device)
        self._token_words = torch.tensor(words, dtype=torch.int32, device=self._device)
        self._block_words = self._token_words.long() * self._block_size

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Carry out ``(source, target, tokens)`` as if one after another.

        Copies that touch each other's blocks go into launches of their own; nearly always there is one launch.

        Raises:
            ValueError: a block or a number of tokens that there is not; nothing is copied.
        """
        for source, target, num_tokens in copies:
            if not (0 <= source < self._num_blocks and 0 <= target < self._num_blocks and source != target):
                raise ValueError(
                    f"copies: expected two of {self._num_blocks} blocks, got {(source, target, num_tokens)}"
                )
            if not 0 <= num_tokens <= self._block_size:
                raise ValueError(f"copies: expected 0 to {self._block_size} tokens, got {(source, target, num_tokens)}")
        for run in _independent_runs(copies):
            launch = torch.tensor(run, dtype=torch.int32)
            if self._device.type == "cuda":
                # From pinned memory, or the driver might wait for what was launched before.
                launch = launch.pin_memory().to(self._device, non_blocking=True)
            self.launch(launch)

    def launch(self, copies: torch.Tensor) -> None:
        """Carry out int32 ``[copies, 3]`` that lie on the device, at once: none may touch a block that another writes.

        Raises:
            ValueError: another shape, type or device. What the copies contain is not checked.
        """
        check_device("copies", self._device)
        check_tensor("copies", copies, (None, 3), (torch.int32,), self._device)
        if len(copies):
            _copy_blocks[(len(copies), len(self._caches))](
                copies.contiguous(), self._addresses, self._token_words, self._block_words, WORDS=_WORDS, **COMPILE_OPTIONS,
            )  # fmt: skip


def _independent_runs(copies: Sequence[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """The copies in order, cut wherever one reads or writes a block that an earlier one of its run has touched."""
    runs: list[list[tuple[int, int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for copy in copies:
        source, target, _ = copy
        if not runs or source in written or target in written or target in read:
            runs.append([])
            read, written = set(), set()
        runs[-1].append(copy)
        read.add(source)
        written.add(target)
    return runs
