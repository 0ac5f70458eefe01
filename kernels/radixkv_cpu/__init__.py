"""Compiled C++ for the CPU: attention over paged keys and values in place, linear layers over packed weights, and what stands
between them.

Only torch and numpy are needed; nothing here knows of radix trees or requests. One idea per file::

    library       which compiled variant this processor runs
    source_digest whether it was compiled from the sources that are here
    linear        products with packed weights; src/features.cpp reads single ones
    formats       how integers, scales and centres lie in memory
    quantised     packed weights of 8 or 4 bits
    blocks        packed weights that were quantised elsewhere, as they are
    attention     partial results over ranges of keys, merged
    experts       mixtures of gated MLPs
    layer         a decoder layer, of all these
    layers        decoder layers in one call
    elementwise   norms, rotary positions, writing into the cache
    rows          blocks of the cache as rows of bytes
    records       such rows in files, checked
    draw          one token per row of logits
    logprobs      log-probabilities of tokens
    checks        what is refused before compiled code sees a pointer
    fields        of the structures in which arguments are handed over
    src/          the C++, one file of the same name for each, and
      calls.h       the functions and their arguments
      simd.h        as many lanes of float32 as a register has
      vocabulary.h  the likeliest tokens of a row
      panel.h       rows times a panel of 32 columns, the product that the others are made of
      tiles.h       the same product by AMX
      quantised.h   panels of integers
      xxhash.h      checksums: the xxHash library, as it is published

The functions take contiguous torch tensors in float32 or bfloat16 on the CPU, where they do not say otherwise, and share
torch's threads. They raise RuntimeError where no variant runs on this machine: ask `library` first. None computes gradients.
"""

from radixkv_cpu.attention import MAX_DECODING_ROWS, PagedAttention, RowKind
from radixkv_cpu.blocks import Blocks, BlockWeight
from radixkv_cpu.checks import COMPILED_DTYPES
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
    "COMPILED_DTYPES",
    "MAX_DECODING_ROWS",
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
