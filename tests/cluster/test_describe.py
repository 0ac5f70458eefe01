"""What a replica says that it runs: others go on with its answers where they say the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
import transformers
from support.replica_servers import tiny_model

from radixkv import LLM, AsyncLLM
from radixkv.cluster.describe import describe


def weights_of(model: transformers.PreTrainedModel | Path) -> str:
    """The name of an engine's weights."""
    return described(LLM(model, num_blocks=20, block_size=16))


def described(llm: LLM) -> str:
    async def main() -> str:
        async with AsyncLLM(llm) as engine:
            weights: str = (await describe(engine, "one", 0.0)).identity["weights"]
            return weights

    return asyncio.run(main())


def tuned(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """With other weights in its linear layers alone, as a merged LoRA has them."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(-1)
    return model


def saved(folder: Path) -> Path:
    tiny_model(50).save_pretrained(folder)
    return folder


def test_models_in_memory_are_named_by_all_of_their_weights() -> None:
    """Native code had repacked the linear layers when they were named: what differed only there had one name, and an answer
    went on with other weights when its replica died.
    """
    assert weights_of(tiny_model(50)) == weights_of(tiny_model(50)) != weights_of(tuned(tiny_model(50)))


def test_a_model_that_was_changed_in_memory_is_not_named_by_its_files(tmp_path: Path) -> None:
    """Fine-tuned models kept the name of the base's files, or of its revision on the hub."""
    saved(tmp_path)
    base, other = (transformers.LlamaForCausalLM.from_pretrained(tmp_path) for _ in range(2))
    base.config._commit_hash = other.config._commit_hash = "a revision"
    assert weights_of(base) != weights_of(tuned(other))


def test_a_folder_is_named_by_its_files(tmp_path: Path) -> None:
    first, again = saved(tmp_path / "first"), saved(tmp_path / "again")
    other = tmp_path / "other"
    tuned(tiny_model(50)).save_pretrained(other)
    assert weights_of(first) == weights_of(again) != weights_of(other)


def test_files_that_were_replaced_after_loading_name_nothing(tmp_path: Path) -> None:
    """An engine that had loaded the old files was named by the new ones when an ingress first asked."""
    folder = saved(tmp_path)
    llm = LLM(folder, num_blocks=20, block_size=16)
    tuned(tiny_model(50)).save_pretrained(folder)
    assert described(llm) != weights_of(folder)


def test_what_was_repacked_without_a_name_is_like_no_other_replica(tmp_path: Path) -> None:
    model = LLM(saved(tmp_path), num_blocks=20, block_size=16).engine.loaded.model
    assert weights_of(model) != weights_of(model)
