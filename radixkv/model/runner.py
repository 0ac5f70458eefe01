"""One forward pass over a packed batch, with attention over the cache's blocks.

The model is a Hugging Face causal language model, running its own code. It is called with one row that holds all sequences'
new tokens, and its attention layers call back: each writes its new keys and values into the pool and attends over the plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from radixkv.attention import AttentionBackend, AttentionOptions, BatchLimits, NewTokens
from radixkv.attention.choice import make_backend
from radixkv.attention.host_backend import HostBackend
from radixkv.attention.native import NativeAttention, NativeBackend
from radixkv.attention.query_batch import concatenated_ranges
from radixkv.cache import BlockCopy
from radixkv.errors import UnsupportedModelError
from radixkv.memory import KVPool, LayerShape, StatePool, StateShape
from radixkv.memory.upload import to_device
from radixkv.model.attention_function import ATTENTION_NAME, set_attention
from radixkv.model.forward_pass import Attend, ForwardPass, Recur, RunChain, running
from radixkv.model.graphs.compiled_layers import compile_layers, uncompile_layers
from radixkv.model.layer_probe import attend_nothing
from radixkv.model.loader import LoadedModel
from radixkv.model.logits_to_keep import head_of_all_rows, wanted_rows
from radixkv.model.model_input import ModelInput
from radixkv.model.native import Chain, layers_over
from radixkv.model.recurrent import RecurrentStep, recur_alone, recur_in_one, take_over_layers
from radixkv.model.replacement.deferred_rotation import DeferredRotation, set_rotate_first
from radixkv.model.structure import find_structure
from radixkv.process_bound import refuse_copies
from radixkv_cpu import DecoderLayers

if TYPE_CHECKING:
    from radixkv.attention.triton.padded_decode import PaddedDecode
    from radixkv.model.graphs.decode_graphs import DecodeGraphs

_log = logging.getLogger(__name__)


class ModelRunner:
    """Runs one model; a model belongs to one runner at a time.

    Args:
        enable_torch_compile: compile the model's decoder layers, now.
        must_compile: a failure to compile is an error; if false, layers then run uncompiled, and a warning says so.

    Raises:
        UnsupportedModelError: the model does not call the attention interface, or calls it in a way that blocks cannot serve;
            it has heads that no kernel for its GPU takes; or its layers must be compiled and cannot be.

    Attributes:
        num_logits: per row of logits.
    """

    def __init__(self, loaded: LoadedModel, enable_torch_compile: bool = False, must_compile: bool = True) -> None:
        self._model = loaded.model
        self._dtype = loaded.dtype
        self._device = loaded.device
        self._max_model_len = loaded.max_model_len
        self._backend: AttentionBackend | None = None
        self._states: StatePool | None = None
        self._graphs: DecodeGraphs | None = None
        # The calls that compute chains of layers over the pool, by the first layer's index.
        self._chain_calls: dict[int, DecoderLayers] = {}
        self._head = head_of_all_rows(self._model)
        self._checked: set[tuple[int, torch.dtype]] = set()

        self._model.eval()
        set_attention(self._model, ATTENTION_NAME)
        self._text_config: Any = self._model.config.get_text_config()
        used = self._text_config._attn_implementation
        if used != ATTENTION_NAME:
            raise UnsupportedModelError(f"{loaded.name}: the model keeps its own attention ({used!r})")
        vars(self._model).update(radixkv_runner=self, __reduce_ex__=partial(refuse_copies, f"{loaded.name} in an LLM"))
        uncompile_layers(self._model)
        set_rotate_first(self._model, True)
        self._recurrent = take_over_layers(self._model, loaded.name)
        self._can_capture = not self._recurrent
        self._structure = find_structure(loaded, self._forward, self._recurrent)
        self.num_logits = self._structure.num_logits
        # By a layer's index, which of the pool's it is.
        self._layer_of = {layer_idx: layer for layer, layer_idx in enumerate(self._structure.layers)}
        if self._device.type == "cuda":
            self._check_heads(loaded.name)
        # Set before layers are compiled: on a GPU, rotation is left to Triton.
        set_rotate_first(self._model, self._device.type != "cuda")
        if enable_torch_compile:
            self._compile(loaded.name, must_compile)

    @property
    def layer_shapes(self) -> list[LayerShape]:
        """What each attention layer stores per token, in the order of the pool's layers."""
        return [layer.shape for layer in self._structure.layers.values()]

    @property
    def recurrent_layers(self) -> list[tuple[StateShape, ...]]:
        """By recurrent layer, the shapes of its states, in the order of the pool's."""
        return [layer.shapes for layer in self._recurrent]

    def use_pool(self, pool: KVPool, backend: str, limits: BatchLimits, enforce_eager: bool) -> None:
        """Keep keys and values in ``pool``, whose layers must be ``layer_shapes``, and attend with ``backend``.

        Args:
            pool: of keys and values.
            backend: one of `radixkv.attention.choice.BACKENDS`.
            limits: of the batches.
            enforce_eager: no CUDA graphs for decoding; otherwise `capture_graphs` makes them.

        Raises:
            ValueError: there is no such backend, it cannot take the pool, or it is not installed.
            RuntimeError: on a GPU, a kernel that the layers need does not run, or gives wrong results.
        """
        first = next(iter(self._structure.layers.values()))
        with self._on_device():  # for which its tiles are chosen
            self._backend = make_backend(backend, pool, self._dtype, first.num_query_heads, limits)
        self._graphs = None
        self._states = pool.states
        set_rotate_first(self._model, isinstance(self._backend, HostBackend))
        is_native = isinstance(self._backend, NativeBackend)
        self._chain_calls = layers_over(pool, self._structure.chains, self._layer_of) if is_native else {}
        if self._device.type == "cuda":
            self.check_kernels(pool.block_size, pool.dtype)
        if not enforce_eager and self._can_capture and not isinstance(self._backend, HostBackend):
            # Only here: it imports Triton, which a CPU need not have.
            from radixkv.attention.triton import TritonBackend
            from radixkv.model.graphs.decode_graphs import DecodeGraphs

            assert isinstance(self._backend, TritonBackend)
            groups = {layer.num_query_heads // layer.shape.num_kv_heads for layer in self._structure.layers.values()}
            self._graphs = DecodeGraphs(
                self._backend, self._forward_padded, limits.max_num_seqs, limits.max_draft_rows, groups=groups
            )

    @torch.inference_mode()
    def check_kernels(self, block_size: int, cache_dtype: torch.dtype) -> None:
        """Run every kernel that the layers need once, unless this block size and cache type were checked before.

        Raises:
            RuntimeError: one does not run, or its result is wrong; the message names it.
        """
        if (block_size, cache_dtype) in self._checked:
            return
        # Only here: it imports Triton, which a CPU need not have.
        from radixkv.attention.triton.start_check import check_kernels

        rotary_dims = {
            module.layer_idx: module.rotary_dim
            for module in self._model.modules()
            if isinstance(module, DeferredRotation)
        }
        layers = [replace(layer, rotary_dim=rotary_dims.get(index)) for index, layer in self._structure.layers.items()]
        with self._on_device():
            check_kernels(layers, block_size, self._dtype, cache_dtype, self._device, self.num_logits)
        self._checked.add((block_size, cache_dtype))

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture the CUDA graphs that decoding will run in, if it uses any."""
        if self._graphs is not None:
            with self._on_device():
                self._graphs.capture()

    @torch.inference_mode()
    def measure_graphs(self, free_memory: Callable[[], int]) -> int:
        """Estimate the bytes of GPU memory that all graphs will take from the first ones, over a pool of any size.

        All use the memory of the largest, and each takes some of its own. The captured graphs and the pool are released;
        `use_pool` comes next.

        Args:
            free_memory: bytes that are free on the device, torch's reserve not counted as used.
        """
        graphs, self._graphs = self._graphs, None
        if graphs is None:
            return 0
        largest, others = graphs.kinds[:2], graphs.kinds[2:4]
        with self._on_device():
            graphs.capture(largest)
            with_largest = free_memory()
            if graphs.num_captured:
                graphs.capture(others)
            with_others = free_memory()
            if not graphs.num_captured:  # the log has the reason
                self._can_capture = False
                return 0
            num_others, num_left = graphs.num_captured - len(largest), len(graphs.kinds) - graphs.num_captured
            del graphs
            self._backend = None
            each = max(0, with_largest - with_others) / max(1, num_others)
            return free_memory() - with_others + int(each * num_left)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Carry out the cache's queued copies, in order."""
        assert self._backend is not None, "use_pool comes first"
        with self._on_device():
            self._backend.copy_blocks(copies)
            if self._states is not None:
                self._states.copy_blocks(copies)

    @torch.inference_mode()
    def run(self, model_input: ModelInput, device_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the input's tokens and store their keys and values.

        Args:
            device_tokens: int64 tokens on the device, to which ``model_input.device_indices`` refer.

        Returns:
            float32 logits ``[rows, vocabulary]``: ``num_logits`` rows per sequence, in the order of the input.
        """
        with self._on_device():
            return self._run(model_input, device_tokens)

    def check_device(self) -> None:
        """Wait until the device has done what was launched on it.

        Raises:
            RuntimeError: something failed there after which no step can succeed any more, such as an illegal access.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Triton launches on the current device, whatever device its tensors are on."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _run(self, model_input: ModelInput, device_tokens: torch.Tensor | None) -> torch.Tensor:
        assert self._backend is not None, "use_pool comes first"
        owner: object = vars(self._model).get("radixkv_runner")
        if owner is not self:
            raise RuntimeError("model: it was given to another LLM since, which runs it now; make this one anew")
        used = self._text_config._attn_implementation
        if used != ATTENTION_NAME:
            raise RuntimeError(
                f"model: expected the attention that its LLM set, got {used!r}; model.set_attn_implementation"
                f"({ATTENTION_NAME!r}) lets the LLM run it again"
            )
        num_new, num_logits = model_input.queries.num_new, model_input.num_logits
        batch = self._backend.prepare(model_input.queries)
        order, row_starts = batch.order, batch.row_starts
        token_ids = model_input.packed_tokens(order, row_starts, self._device, device_tokens)
        # All sequences decode, with drafts or without, if logits are wanted of every row.
        if self._graphs is not None and np.array_equal(num_new, num_logits):
            decoded = self._graphs.run(token_ids, batch)
            if decoded is not None:
                return decoded
        stops = np.empty(len(order), dtype=np.int64)
        stops[order] = row_starts[1:]
        keep = concatenated_ranges(stops - num_logits, num_logits)
        # Heads do not accept an empty batch: if no logits are needed, one row is computed and dropped.
        rows = to_device(torch.from_numpy(keep if len(keep) else np.zeros(1, dtype=np.int64)), self._device)
        run_chain = None
        if isinstance(batch, NativeAttention):
            run_chain = partial(self._run_chain, batch)
            if self._structure.last_layer is not None:
                batch.keep(rows.numpy())
        recur = recur_alone
        if self._states is not None:
            recur = RecurrentStep(self._states, model_input.queries, order, row_starts).recur
        attend = partial(self._attend, batch.attend)
        logits = self._forward(token_ids, batch.positions, rows, attend, recur, run_chain)
        return logits[: len(keep)].float()

    def _attend(
        self,
        attend: Callable[[int, NewTokens, AttentionOptions], torch.Tensor],
        layer_idx: int,
        new: NewTokens,
    ) -> torch.Tensor:
        """Attend a layer of the model by ``attend`` of a batch, which numbers layers as the pool does."""
        options = self._structure.layers[layer_idx].options
        return attend(self._layer_of[layer_idx], new, options)

    def _run_chain(
        self,
        batch: NativeAttention,
        chain: Chain,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """What the layers of a chain give for the rows of a batch, ``[1, tokens, dim]``."""
        kept = batch.kept if chain[-1].layer_idx == self._structure.last_layer else None
        layers = self._chain_calls[chain[0].layer_idx]
        cos, sin = (part[0].contiguous() for part in position_embeddings)
        x = hidden_states[0].contiguous()
        output = layers.run(x, cos, sin, batch.slots, batch.paged, kept, batch.decoding).unsqueeze(0)
        return output if kept is None else hidden_states.index_copy(1, kept[0], output)

    def _forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor | None,
        rows: torch.Tensor,
        attend: Attend,
        recur: Recur = recur_alone,
        run_chain: RunChain | None = None,
    ) -> torch.Tensor:
        """The logits of ``rows``.

        Args:
            positions: of the tokens; None: as the model itself counts those of one sequence.
            attend: see `ForwardPass`.
            recur: likewise.
            run_chain: likewise.
        """
        token = running.set(ForwardPass(attend, recur, run_chain))
        try:
            with wanted_rows(self._head, rows) as arguments:
                output = self._model(
                    input_ids=token_ids.unsqueeze(0),
                    position_ids=None if positions is None else positions.unsqueeze(0),
                    use_cache=False,
                    **arguments,
                )
        finally:
            running.reset(token)
        logits: torch.Tensor = output.logits[0]
        return logits

    def _forward_padded(self, padded: PaddedDecode) -> torch.Tensor:
        """The logits of all rows of a padded decoding batch, padding included, in the query batch's order."""
        positions = padded.rows.positions.clamp_min(0).long()
        attend = partial(self._attend, padded.attend)
        return self._forward(padded.token_ids, positions, padded.logit_rows, attend)

    @torch.inference_mode()
    def measure_activations(
        self, num_tokens: int, num_logit_rows: int, use_logits: Callable[[torch.Tensor], None]
    ) -> int:
        """Run a step of ``num_tokens`` on a GPU, with memory for attention's results but without attending.

        Args:
            use_logits: the use of the step's logits that takes the most memory.

        Returns:
            The bytes that it took beyond the weights.
        """
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        tokens = torch.arange(num_tokens, device=self._device)
        rows = tokens[:num_logit_rows]
        # As of several sequences: a model's table of positions may end at the longest sequence.
        positions = tokens % self._max_model_len
        # Held for the whole step; the states of one layer, for all sequences that decode, are held while it runs.
        states_nbytes = num_logit_rows * max(
            (sum(s.nbytes for s in shapes) for shapes in self.recurrent_layers), default=0
        )
        partials_nbytes = self._partials_nbytes(num_tokens)
        partials = torch.empty(partials_nbytes + states_nbytes, dtype=torch.uint8, device=self._device)
        logits = self._forward(torch.zeros_like(tokens), positions, rows, attend_nothing, recur_in_one).float()
        use_logits(logits)
        del partials
        return torch.cuda.max_memory_allocated(self._device) - before

    def _partials_nbytes(self, num_tokens: int) -> int:
        # Only here: it imports Triton, which a CPU need not have.
        from radixkv.attention.triton.cost_model import decode_tiling, partials_nbytes

        with self._on_device():  # for which its tiles are chosen
            tiling = decode_tiling(self._device, self.layer_shapes)
        heads = {(layer.num_query_heads, layer.shape) for layer in self._structure.layers.values()}
        return max(
            partials_nbytes(num_tokens, heads, self._dtype, replace(tiling, one_class=one_class))
            for one_class in (False, True)
        )

    def _check_heads(self, name: str) -> None:
        # Only here: it imports Triton, which a CPU need not have.
        from radixkv.attention.triton.heads import check_heads

        for layer in self._structure.layers.values():
            try:
                check_heads(layer.num_query_heads, layer.shape)
            except ValueError as error:
                raise UnsupportedModelError(f"{name}: {error}") from error

    @torch.inference_mode()
    def _compile(self, name: str, must_compile: bool) -> None:
        """Compile now what every batch will need, so that no request waits for it and no failure comes later."""
        try:
            if self._recurrent:
                raise NotImplementedError("recurrent layers are called sequence by sequence")
            compile_layers(self._model)
            for num_tokens in (2, 1):
                positions = torch.arange(num_tokens, device=self._device)
                self._forward(torch.zeros_like(positions), positions, positions[:1], attend_nothing)
        except Exception as error:  # uncompiled, the same has just run
            uncompile_layers(self._model)
            reason = " ".join(str(error).split("\n")[:2])
            if not must_compile:
                _log.warning("%s: its layers run as they are: torch.compile cannot compile them (%s)", name, reason)
                return
            raise UnsupportedModelError(
                f"{name}: torch.compile cannot compile its layers ({reason}); "
                "expected a model and a compiler that it can use, or enable_torch_compile=False"
            ) from error
