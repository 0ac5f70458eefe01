"""Of a model on the hub, what is needed is fetched, and it loads as from a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from support.hub_cache import REVISION, cached_snapshot
from support.model_zoo import build, build_supported

from radixkv.config import ModelConfig
from radixkv.errors import ModelLoadError
from radixkv.model.hub import fetch
from radixkv.model.loader import load_model
from radixkv.model.tokenizer import load_tokenizer
from radixkv.model.weights.checkpoint import read_checkpoint
from radixkv_cpu import library

TEXTS = {"config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "merges.txt"}
NEVER = {"original/consolidated.00.pth", "code.py", "model.gguf", "README.md", "onnx/model.onnx"}
SHARDS = {"of-two-1.safetensors", "of-two-2.safetensors", "model.safetensors.index.json"}
BINARIES = {"pytorch_model.bin", "training_args.bin"}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is in a model's repository on a hub that can be reached; `fetch` fetches to the folder named by the revision."""
    repository = tmp_path / "repository"

    def download(model: str, *, revision: str = REVISION, allow_patterns: Sequence[str]) -> str:
        names = [str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file()]
        matching = [*filter_repo_objects(names, allow_patterns=[*allow_patterns])]
        assert matching  # otherwise huggingface_hub writes a warning
        for name in matching:
            path = tmp_path / revision / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(repository / name, path)
        return str(tmp_path / revision)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return repository


def fill(repository: Path, names: set[str]) -> None:
    for name in names:
        path = repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    index = repository / "model.safetensors.index.json"
    if index.exists():
        index.write_text(json.dumps({"weight_map": {"a": "of-two-1.safetensors", "b": "of-two-2.safetensors"}}))


@pytest.mark.parametrize(
    ("weights", "fetched"),
    [
        ({"model.safetensors", "consolidated.safetensors"} | BINARIES, {"model.safetensors"}),
        (SHARDS | {"consolidated.safetensors"} | BINARIES, SHARDS),
        ({"adapter_model.safetensors"} | BINARIES, {"pytorch_model.bin"}),
        ({"gptq_model-4bit.safetensors", "training_args.bin"}, {"gptq_model-4bit.safetensors"}),
        (set(), set()),
    ],
)
def test_weights_are_fetched_in_one_format(weights: set[str], fetched: set[str], repository: Path) -> None:
    """All safetensors were, which of some models are the same weights twice."""
    fill(repository, TEXTS | NEVER | weights)
    folder = fetch("some/model", with_weights=True)
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == TEXTS | fetched


def test_for_a_tokenizer_no_weights_are_fetched(repository: Path) -> None:
    fill(repository, TEXTS | NEVER | BINARIES | {"model.safetensors"})
    folder = fetch("some/model", with_weights=False)
    assert {path.name for path in folder.iterdir()} == TEXTS


def test_a_tokenizer_on_the_hub_needs_no_model_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cached_snapshot(tmp_path / "hub", "some/tokenizer", monkeypatch)
    build_supported("llama").config.save_pretrained(folder)
    with pytest.raises(ModelLoadError, match=f"^some/tokenizer: there is no tokenizer in {folder}$"):
        load_tokenizer("some/tokenizer")


def test_models_of_the_hub_are_named_by_their_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By it, replicas are of one generation."""
    build_supported("llama").save_pretrained(cached_snapshot(tmp_path / "hub", "some/model", monkeypatch))
    assert load_model("some/model").origin == REVISION


@pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")
def test_weights_of_the_hub_stay_in_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were in memory whole, beside what is made of them."""
    build_supported("llama").save_pretrained(cached_snapshot(tmp_path / "hub", "some/model", monkeypatch))
    given: list[Path] = []

    def read(folder: Path, name: str, dtype: torch.dtype, device: torch.device, may_defer: bool) -> object:
        given.append(folder)
        found = read_checkpoint(folder, name, dtype, device, may_defer)
        assert found[1] is not None
        return found

    monkeypatch.setattr("radixkv.model.loader.read_checkpoint", read)
    load_model("some/model", ModelConfig(dtype="float32"))
    assert [path.name for path in given] == [REVISION]


@pytest.mark.parametrize("missing", ["model.safetensors", "a shard"])
def test_a_model_of_which_files_were_not_fetched_is_refused(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a download that was interrupted, where there is no network."""
    folder = cached_snapshot(tmp_path / "hub", "some/model", monkeypatch)
    model = build("llama", {"hidden_size": 64, "head_dim": 16, "num_hidden_layers": 2})
    model.save_pretrained(folder, max_shard_size="100KB" if missing == "a shard" else "1GB")
    lacking = sorted(folder.glob("*.safetensors"))[-1]
    lacking.unlink()
    with pytest.raises(ModelLoadError, match=f"^some/model: could not be loaded .*{lacking.name}"):
        load_model("some/model", ModelConfig(dtype="float32"))
