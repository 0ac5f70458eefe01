"""All tensors of a quantised checkpoint, by the parameters of its model."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from radixkv.model.quantised.method import METHODS
from radixkv.model.quantised.tensors import FLOATS, ModuleTensors, OtherLayoutError, StoredMatrix, UnreadableError
from radixkv.model.weights.deferred import ROWS_OF_A_PIECE, CheckpointFiles
from radixkv_cpu import Blocks

# Last parts of names: of tensors for activations, keys and values, whose quantisation is ignored, and of constants that old
# files have.
_IGNORED = re.compile(r"(input|output|activation|_weight_act_quant|[qkv])_(scale(_ub)?|zero_point|g_idx)|inv_freq")

_log = logging.getLogger(__name__)


class QuantisedFiles(CheckpointFiles):
    """A folder's safetensors, quantised or not.

    Args:
        paths: as of `CheckpointFiles`.
        quantisation: its ``quantization_config``, of one of `METHODS`.
        model: without weights.

    Raises:
        OSError, SafetensorError: the files cannot be read.
        OtherLayoutError: they are of a layout that is not read here.
        UnreadableError: not all of the model's parameters are there, as the format says; a module has more tensors than the
            format defines; or what is tied is stored twice with other numbers.
    """

    has_blocks = True

    def __init__(
        self, paths: Sequence[Path], quantisation: Mapping[str, Any], model: transformers.PreTrainedModel
    ) -> None:
        super().__init__(paths)
        self._method = METHODS[quantisation["quant_method"]]
        self._quantisation = quantisation
        self._dtype = model.dtype
        self._matrices: dict[str, StoredMatrix] = {}
        self._method.check_config(quantisation)
        missing, known = self._find_all(model)
        self._check_others(paths[0].parent, model, missing, known)

    def _find_all(self, model: transformers.PreTrainedModel) -> tuple[list[str], set[str]]:
        """The parameters that are not there, and the tensors that buffers and all other parameters are made of."""
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        known: set[str] = {name for name in model.state_dict() if name not in parameters}  # buffers
        missing: list[str] = []
        first: dict[nn.Parameter, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            owner = first.setdefault(parameter, name)
            if owner != name:  # it is tied, and may be stored twice
                known.add(name)
                if owner not in missing and not self.is_stored_as(name, owner):
                    raise UnreadableError(
                        f"{name}: expected the numbers of {owner}, which the configuration ties it to, got others; for one "
                        'of its own, it has to say "tie_word_embeddings": false'
                    )
                continue
            found = self._find(model, name, parameter)
            known |= found
            missing += [] if found else [name]
        return missing, known

    def _check_others(
        self, folder: Path, model: transformers.PreTrainedModel, missing: list[str], known: set[str]
    ) -> None:
        """Refuse a checkpoint that lacks parameters, or has other tensors of the model's modules; the log names the rest."""
        modules = {name for name, _ in model.named_modules()}
        others = [name for name in self._files if name not in known and not self._is_ignored(model, name)]
        strays = [name for name in others if name.rpartition(".")[0] in modules]
        if missing and others and not strays:
            raise OtherLayoutError(
                f"there is no tensor {missing[0]}, but {others[0]}, which is no parameter of the model"
            )
        if missing:
            raise UnreadableError(f"there is no tensor {missing[0]}, quantised or not")
        if strays:
            raise UnreadableError(f"{strays[0]}: expected no such tensor of a module that the model has")
        if others:
            _log.info(
                "%s: %d tensors are no part of the model and are not read: %s, ...",
                folder,
                len(others),
                others[0],
            )

    def read(self, name: str) -> torch.Tensor:
        matrix = self._matrices.get(name)
        return super().read(name) if matrix is None else matrix.read().dequantise(self._dtype)

    def blocks(self, name: str) -> Blocks | None:
        matrix = self._matrices.get(name)
        return None if matrix is None else matrix.read().blocks()

    def _pieces(self, name: str) -> Iterator[torch.Tensor]:
        return iter(self.read(name).split(ROWS_OF_A_PIECE)) if name in self._matrices else super()._pieces(name)

    def _find(self, model: nn.Module, name: str, parameter: nn.Parameter) -> set[str]:
        """Names of the tensors that a parameter is made of; none: it is not there."""
        module, _, part = name.rpartition(".")
        tensors = ModuleTensors(self._files, module)
        if part == "weight" and parameter.dim() == 2:
            features, inputs = parameter.shape
            matrix = self._method.find(tensors, (features, inputs), self._quantisation)
            if matrix is not None:
                if not isinstance(model.get_submodule(module), nn.Linear | nn.Embedding):
                    kind = type(model.get_submodule(module)).__name__
                    raise UnreadableError(f"{name}: expected quantised weights of a linear layer, got those of {kind}")
                self._matrices[name] = matrix
                return tensors.used
        if part not in tensors:
            return set()
        tensors.check(part, [parameter.shape], FLOATS)
        return tensors.used

    def _is_ignored(self, model: transformers.PreTrainedModel, name: str) -> bool:
        """Whether nothing that is computed depends on a tensor."""
        part = name.rpartition(".")[2]
        if _IGNORED.fullmatch(part):
            return True
        if part == "bias":  # AutoGPTQ wrote them for layers without biases
            return not bool(super().read(name).any())
        patterns = model._keys_to_ignore_on_load_unexpected or ()
        return any(re.search(pattern, name) for pattern in patterns)
