"""GGUF files of tiny random models, and random blocks, made with the `gguf` package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers


def random_blocks(kind: str, rows: int, weights: int, generator: np.random.Generator) -> torch.Tensor:
    """Blocks of random bytes, uint8 ``[rows, bytes of a row]``, but for float16 numbers, which are about 0.01."""
    per_block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = generator.integers(0, 256, (rows, weights // per_block, num_bytes), dtype=np.uint8)
    offsets = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208]}[kind]
    for offset in offsets:
        numbers = (generator.standard_normal(blocks.shape[:2]) / 100).astype(np.float16)
        blocks[..., offset : offset + 2] = numbers[..., None].view(np.uint8)
    return torch.from_numpy(blocks.reshape(rows, -1))


def write_llama(
    model: transformers.PreTrainedModel, path: Path, kind_of: Callable[[str], str] = lambda _: "Q8_0"
) -> None:
    """Write a Llama as a GGUF file with a tokenizer of characters and one merge.

    Args:
        kind_of: of a matrix, by its GGUF name, the kind of its blocks. Those that gguf cannot make are random.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    characters = [chr(0x100 + i) for i in range(config.vocab_size - 1)]
    writer.add_token_list([*characters, characters[0] + characters[1]])
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * config.vocab_size)
    writer.add_token_merges([f"{characters[0]} {characters[1]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    generator = np.random.default_rng(0)
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, suffix = hf_name.rsplit(".", 1)
        name, weight = f"{names.get_name(stem)}.{suffix}", tensor.numpy()
        if weight.ndim == 1:
            writer.add_tensor(name, weight)
            continue
        if "attn_q" in name or "attn_k" in name:  # llama.cpp turns neighbouring dimensions
            heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
            weight = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        kind = gguf.GGMLQuantizationType[kind_of(name)]
        try:
            blocks = gguf.quantize(np.ascontiguousarray(weight), kind)
        except NotImplementedError:
            blocks = random_blocks(kind.name, *weight.shape, generator).numpy()
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
