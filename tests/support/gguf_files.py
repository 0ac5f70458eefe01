"""GGUF files of tiny random models, and random blocks, made with the `gguf` package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from radixkv.model.gguf import conversion as gguf_conversion


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
    """Write a Llama, see `write_model`."""
    write_model(model, path, "llama", kind_of)


def write_model(
    model: transformers.PreTrainedModel,
    path: Path,
    architecture: str,
    kind_of: Callable[[str], str] = lambda _: "Q8_0",
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, NDArray[np.float32]] | None = None,
    control_tokens: Mapping[int, str] | None = None,
) -> None:
    """Write a model as a GGUF file, as llama.cpp's converter does, with a tokenizer of characters and one merge.

    Args:
        architecture: llama.cpp's name of it.
        kind_of: the kind of a matrix's blocks, by its GGUF name. Blocks that gguf cannot make are random.
        fields: further fields, by names without the architecture's, or of the tokenizer or a split; for one that
            every file has, another value, or None to leave it out.
        tensors: more tensors of the file.
        control_tokens: texts of control tokens, by their ids, which are more than 1.
    """
    writer = gguf.GGUFWriter(path, architecture)
    _add_config(writer, model.config, architecture, fields or {})
    _add_tokenizer(writer, model.config.vocab_size, control_tokens or {})
    for name, floats in (tensors or {}).items():
        writer.add_tensor(name, floats)
    _add_weights(writer, model, architecture, kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_config(writer: gguf.GGUFWriter, config: Any, architecture: str, fields: Mapping[str, Any]) -> None:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", None),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": getattr(config, "head_dim", None),
        "vocab_size": config.vocab_size,
        **fields,
    }
    for name, value in sizes.items():
        _add_field(writer, name if name.startswith(("tokenizer.", "split.")) else f"{architecture}.{name}", value)


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int, control_tokens: Mapping[int, str]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    characters = [chr(0x100 + i) for i in range(vocab_size - 1)]
    kinds = [int(gguf.TokenType.NORMAL)] * vocab_size
    for token_id, text in control_tokens.items():
        characters[token_id], kinds[token_id] = text, int(gguf.TokenType.CONTROL)
    writer.add_token_list([*characters, characters[0] + characters[1]])
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{characters[0]} {characters[1]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _add_weights(
    writer: gguf.GGUFWriter, model: transformers.PreTrainedModel, architecture: str, kind_of: Callable[[str], str]
) -> None:
    config = model.config
    kind_of_model = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind_of_model, config.num_hidden_layers)
    generator = np.random.default_rng(0)
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, suffix = hf_name.rsplit(".", 1)
        name, weight = f"{names.get_name(stem)}.{suffix}", tensor.numpy()
        if weight.ndim == 3:  # of experts
            layer = hf_name.split(".")[2]
            parts = np.split(weight, 2, axis=1) if suffix == "gate_up_proj" else [weight]
            for part, floats in zip(("gate", "up") if len(parts) == 2 else ("down",), parts, strict=True):
                writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", floats)
            continue
        if name.endswith("ffn_gate_inp_shexp.weight"):  # of one row
            weight = weight[0]
        if weight.ndim == 1:
            has_one_more = name.endswith("norm.weight") and architecture.startswith(("gemma", "nemotron"))
            writer.add_tensor(name, weight + has_one_more)
            continue
        if architecture == "llama" and (
            "attn_q" in name or "attn_k" in name
        ):  # llama.cpp turns neighbouring dimensions
            heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
            weight = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        kind = gguf.GGMLQuantizationType[kind_of(name)]
        try:
            blocks = gguf.quantize(np.ascontiguousarray(weight), kind)
        except NotImplementedError:
            blocks = random_blocks(kind.name, *weight.shape, generator).numpy()
        writer.add_tensor(name, blocks, raw_dtype=kind)


def _add_field(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif value is not None:
        writer.add_array(name, value)


def refuse_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files be converted to floats, as those are whose blocks cannot be kept."""

    def refuse(path: Path, folder: Path) -> None:
        raise gguf_conversion.NotInBlocksError("not today")

    monkeypatch.setattr(gguf_conversion, "_convert_in_blocks", refuse)
