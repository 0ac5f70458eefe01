"""How a GGUF file scales rotary embeddings is part of the model that is made of it, or the file is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.gguf_files import write_llama
from support.model_zoo import build

from radixkv.config import ModelConfig
from radixkv.errors import ModelLoadError
from radixkv.model import gguf_conversion
from radixkv.model.loader import load_model

SIZES: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write(path: Path, monkeypatch: pytest.MonkeyPatch, factors: Any, scaling: str | None = None) -> None:
    """A Llama with these factors, by llama.cpp's name of them."""
    start = gguf.GGUFWriter.add_bos_token_id

    def start_with_factors(self: Any, token_id: int) -> None:
        start(self, token_id)
        if factors is not None:
            self.add_tensor("rope_freqs.weight", np.asarray(factors, dtype=np.float32))
        if scaling is not None:
            self.add_rope_scaling_type(gguf.RopeScalingType(scaling))
            self.add_rope_scaling_factor(4.0)

    monkeypatch.setattr(gguf.GGUFWriter, "add_bos_token_id", start_with_factors)
    monkeypatch.setenv("RADIXKV_CACHE", str(path.parent / "cache"))
    write_llama(build("llama", SIZES | {"rope_parameters": LLAMA3}), path)


@pytest.mark.parametrize("in_blocks", [True, False])
def test_frequencies_are_those_of_llama_3(in_blocks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = build("llama", SIZES | {"rope_parameters": LLAMA3}).model.rotary_emb.inv_freq
    plain = build("llama", SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}})
    write(tmp_path / "tiny.gguf", monkeypatch, plain.model.rotary_emb.inv_freq / truth)
    if not in_blocks:

        def refuse(path: Path, folder: Path) -> None:
            raise gguf_conversion.NotInBlocksError("not today")

        monkeypatch.setattr(gguf_conversion, "_convert_in_blocks", refuse)
    model = load_model(tmp_path / "tiny.gguf", ModelConfig(dtype="float32"), native=False).model
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, truth)


@pytest.mark.parametrize(
    ("factors", "scaling", "message"),
    [
        ([2.0] * 32, None, r"rope_freqs\.weight: expected factors as Llama 3\.1 has them, got others, up to 2"),
        (None, "yarn", r"rope\.scaling\.type: expected 'none' in a GGUF file, got 'yarn'"),
        (None, "linear", r"rope\.scaling\.type: expected 'none' in a GGUF file, got 'linear'"),
    ],
)
def test_other_scaling_is_refused(
    factors: Any, scaling: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "tiny.gguf", monkeypatch, factors, scaling)
    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path / "tiny.gguf", ModelConfig(dtype="float32"))
