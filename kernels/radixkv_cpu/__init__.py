"""Compiled C++ for the CPU: attention over paged keys and values in place, linear layers over packed weights, and the smaller
operations between them.

Only torch and numpy are needed; nothing here depends on radix trees or requests. One idea per file::

    library       which compiled variant this processor runs
    source_digest whether it was compiled from the sources beside it
    linear        products with packed weights; src/features.cpp reads weights of single features
    formats       how integers, scales and centres lie in memory
    quantised     weights that are quantised here, to 8 or 4 bits
    blocks        weights that were quantised elsewhere, kept as they are
    attention     partial results over ranges of keys, merged
    experts       mixtures of gated MLPs
    layer         a decoder layer, made of all these
    layers        decoder layers in one call
    elementwise   norms, rotary positions, writing into the cache
    rows          blocks of the cache as rows of bytes
    records       such rows read from files and checked
    draw          one token per row of logits
    logprobs      log-probabilities of tokens
    checks        arguments are checked before native code gets a pointer
    fields        fields of the structures in which arguments are handed over
    src/          the C++: for each of these a file of the same name, and
      calls.h       the functions and their arguments; machine.cpp: what a variant needs before it runs
      simd.h        vectors of as many float32 numbers as a register holds
      vocabulary.h  the likeliest tokens of a row
      panel.h       rows times a panel of 32 columns, the product that the others are made of; chunks.h: rows that pass it
                    together
      tiles.h       the same product by AMX; triples.h: in float32
      attention_tasks.h, task_rows.h      how attention is divided, and what all its tasks do
      pack.h, softmax.h                   keys and values into panels; scores into weights
      running_attention.h, unpacked.h     a task without tiles
      tile_attention.h, tile_columns.h, strips.h   a task with tiles
      quantised.h   panels of integers; factored.h: products that are scaled once they are added
      xxhash.h      checksums: the xxHash library, unchanged

Unless they say otherwise, the functions take contiguous torch tensors in float32 or bfloat16 on the CPU. They share torch's
threads, compute no gradients, and raise RuntimeError where no variant runs on this machine: check `library` first.
"""

from radixkv_cpu.attention import MAX_DECODING_ROWS, PagedAttention, RowKind
from radixkv_cpu.blocks import Blocks, BlockWeight
from radixkv_cpu.checks import NATIVE_DTYPES
from radixkv_cpu.draw import Truncation, draw_tokens
from radixkv_cpu.elementwise import rms_norm, rope_, write_cache
from radixkv_cpu.experts import Experts
from radixkv_cpu.layer import DecoderLayer, RMSNorm
from radixkv_cpu.layers import DecoderLayers
from radixkv_cpu.library import VARIANTS, cpu_flags, library, supported_variants
from radixkv_cpu.linear import ACTIVATIONS, PackedWeight, Weight, is_packable
from radixkv_cpu.logprobs import Logprobs, token_logprobs
from radixkv_cpu.quantised import QUANTIZATIONS, Quantised, QuantisedWeight, dequantise, is_quantisable, quantise
from radixkv_cpu.records import read_records
from radixkv_cpu.rows import BlockParts

__all__ = [
    "ACTIVATIONS",
    "MAX_DECODING_ROWS",
    "NATIVE_DTYPES",
    "QUANTIZATIONS",
    "VARIANTS",
    "BlockParts",
    "BlockWeight",
    "Blocks",
    "DecoderLayer",
    "DecoderLayers",
    "Experts",
    "Logprobs",
    "PackedWeight",
    "PagedAttention",
    "Quantised",
    "QuantisedWeight",
    "RMSNorm",
    "RowKind",
    "Truncation",
    "Weight",
    "cpu_flags",
    "dequantise",
    "draw_tokens",
    "is_packable",
    "is_quantisable",
    "library",
    "quantise",
    "read_records",
    "rms_norm",
    "rope_",
    "supported_variants",
    "token_logprobs",
    "write_cache",
]
