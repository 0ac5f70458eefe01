"""A folder's model, with its weights in memory, or in files until they are wanted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers.quantizers import AutoHfQuantizer

from radixkv.errors import ModelLoadError, first_line, one_line
from radixkv.model.gguf.conversion import BLOCKS_FILE
from radixkv.model.out_of_memory import is_out_of_memory
from radixkv.model.quantised import METHODS, OtherLayoutError, QuantisedFiles, UnreadableError, quantisation_of
from radixkv.model.supported import check_supported
from radixkv.model.weights.deferred import BlockFile, CheckpointFiles, DeferredWeights, build_without_weights
from radixkv.model.weights.paths import safetensors_of
from radixkv.model.weights.transformers_model import integers_of_torch, load_whole, refuse_integers

# What safetensors and torch raise for a damaged file, besides OSError.
_OF_DAMAGE = (SafetensorError, UnpicklingError, EOFError, RuntimeError)
# What a wrong configuration raises, besides what `load_errors` takes.
_OF_CONFIG: tuple[type[Exception], ...] = (
    StrictDataclassError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    ArithmeticError,
    AssertionError,
)
# What torch's messages begin with: "[enforce fail at alloc_cpu.cpp:127] err == 0. ".
_FAILED_CHECK = re.compile(r"\[enforce fail at [^]]*\] .*?\. ")


def read_checkpoint(
    folder: Path, name: str, dtype: torch.dtype, device: torch.device, may_defer: bool
) -> tuple[transformers.PreTrainedModel, DeferredWeights | None]:
    """Build a model and read its weights, unless they may stay in their files until they are packed.

    Native code for CPUs packs weights one module at a time. If each module's are read only then, a file in another type is
    never in memory whole. This works for converted GGUF files, for checkpoints quantised by one of `METHODS`, and for folders
    of safetensors with one tensor per parameter; transformers loads all others.

    Args:
        folder: of the model.
        name: that the user gave, for errors about the model rather than its files.
        dtype: of the model.
        device: of the model.
        may_defer: whether weights may stay in files; only on a CPU.

    Returns:
        The model, and where its weights are; None: they are in memory.

    Raises:
        ModelLoadError: transformers makes no model of its configuration; it is quantised, and neither this nor transformers
            can read how; it lacks weights of the model, or has integers for them; a file is damaged; or there is too little
            memory.
        UnsupportedModelError: it is of a kind that generates no text, or that `check_supported` refuses.
        OSError, ValueError: as transformers raises them.
    """
    with _config_errors(folder):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        # Some files name one whose package is missing here; the engine sets its own.
        config._attn_implementation = None
    config.name_or_path = name
    quantisation = quantisation_of(config, folder)
    with _damage_errors(folder):
        paths = safetensors_of(folder)  # first: transformers' error for a damaged index names no file
        deferred: DeferredWeights | None
        if (folder / BLOCKS_FILE).exists():
            model = _build(folder, config, dtype)
            deferred = DeferredWeights(model, BlockFile(folder))
        elif quantisation is not None:
            model, deferred = _open_quantised(folder, paths, config, quantisation, dtype)
        else:
            model, deferred = _open_plain(folder, name, paths, config, dtype, may_defer)
    if may_defer:
        return model, deferred
    with _memory_errors(folder):
        if deferred is not None:
            deferred.fill(model)
        moved: Any = model.to(device)
    return moved, None


@contextmanager
def _config_errors(folder: Path, *others: type[Exception]) -> Iterator[None]:
    """What a wrong configuration raises in transformers' code becomes a `ModelLoadError` that names the folder.

    Args:
        folder: of the model.
        others: what it may raise besides `_OF_CONFIG`.
    """
    try:
        yield
    except _OF_CONFIG + others as error:
        raise ModelLoadError(
            f"{folder}: transformers makes no model of its configuration: {type(error).__name__}: {one_line(str(error))}"
        ) from error


def _build(folder: Path, config: Any, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """`build_without_weights`, where the configuration is the folder's."""
    # RuntimeErrors are torch's, for sizes that are none: no file is read yet.
    with _config_errors(folder, RuntimeError), _memory_errors(folder):
        return build_without_weights(config, dtype)


@contextmanager
def _damage_errors(folder: Path, *others: type[Exception]) -> Iterator[None]:
    """What a damaged file raises becomes a `ModelLoadError` that names the folder, and the file where it is known.

    Args:
        folder: of the model.
        others: what it may raise besides `_OF_DAMAGE`.
    """
    try:
        with _memory_errors(folder):
            yield
    except (NotImplementedError, RecursionError):  # of code, not of a file, though they are RuntimeErrors
        raise
    except _OF_DAMAGE + others as error:
        raise ModelLoadError(
            f"{folder}: its weights cannot be read, a file may be damaged: {_reason(error)}"
        ) from error


@contextmanager
def _memory_errors(folder: Path) -> Iterator[None]:
    """What is raised where memory is lacking becomes a `ModelLoadError` that says so."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelLoadError(f"{folder}: there is too little memory for its weights: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The first sentence, without the check of torch's that failed, and without the advice that follows."""
    return _FAILED_CHECK.sub("", first_line(error)).partition(". ")[0]


def _open_plain(
    folder: Path, name: str, paths: Sequence[Path], config: Any, dtype: torch.dtype, may_defer: bool
) -> tuple[transformers.PreTrainedModel, DeferredWeights | None]:
    """A checkpoint that is not quantised. Its tensors stay in the files only if they are the parameters one by one."""
    files = _files(paths) if may_defer else None
    model = _build(folder, config, dtype)
    if files is not None and not _keeps_float32(model) and files.holds(model):
        refuse_integers(folder, files.integers(), model)
        return model, DeferredWeights(model, files)
    check_supported(model, name)  # before gigabytes are read for nothing
    return _load_all(folder, paths, config, dtype), None


def _files(paths: Sequence[Path]) -> CheckpointFiles | None:
    """None: there are none, or not all of them."""
    try:
        return CheckpointFiles(paths)
    except OSError:
        return None


def _load_all(folder: Path, paths: Sequence[Path], config: Any, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """A model with its weights in memory, none of them integers."""
    with _damage_errors(folder, *_OF_CONFIG):
        model = load_whole(folder, dtype, config)
    integers = CheckpointFiles(paths).integers() if paths[0].exists() else integers_of_torch(folder)
    refuse_integers(folder, integers, model)
    return model


def _keeps_float32(model: transformers.PreTrainedModel) -> bool:
    """Whether some parameters of the model are to be of another type than its own."""
    return model.dtype != torch.float32 and bool(model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict)


def _open_quantised(
    folder: Path, paths: Sequence[Path], config: Any, quantisation: Mapping[str, Any], dtype: torch.dtype
) -> tuple[transformers.PreTrainedModel, DeferredWeights | None]:
    """A quantised checkpoint, read here if it is of `METHODS` and has a tensor for each parameter, else by transformers.

    Raises:
        ModelLoadError: it cannot be read.
    """
    method = quantisation.get("quant_method")
    by = "an unnamed method" if method is None else method  # as MLX writes it
    reason = f"{method!r} is none of {', '.join(METHODS)}"
    if method in METHODS:
        config.quantization_config = dict(quantisation)  # also where it stood elsewhere: models are named by it
        model = _build(folder, config, dtype)
        reason = f"some of its parameters stay in float32 beside {str(dtype).removeprefix('torch.')}"
        try:
            if not _keeps_float32(model):
                return model, DeferredWeights(model, QuantisedFiles(paths, quantisation, model))
        except (OtherLayoutError, FileNotFoundError) as error:
            reason = str(error)
        except (UnreadableError, SafetensorError) as error:
            raise ModelLoadError(f"{folder}: its weights, quantised by {by}, cannot be read: {error}") from error
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise ModelLoadError(
                f"{folder}: quantization_config: expected what {by} writes, got {quantisation!r:.400} ({error})"
            ) from error
    refusal: Exception = ValueError("it does not know the method")
    try:
        # Of a method that it does not know, it would make up the weights.
        if AutoHfQuantizer.supports_quant_method(dict(quantisation)):
            with _memory_errors(folder):
                return load_whole(folder, dtype, config), None
    except (ImportError, ValueError, *_OF_DAMAGE) as error:
        refusal = error
    raise ModelLoadError(
        f"{folder}: its weights, quantised by {by}, cannot be read here ({reason}), nor by transformers "
        f"({_reason(refusal)}); possible are dense models of {', '.join(METHODS)}, GGUF files, and "
        "models that are not quantised, with quantization='int8' or 'int4'"
    )
