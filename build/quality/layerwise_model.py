"""Run a causal language model with one decoder layer in memory at a time.

All texts pass through a layer before the next layer is read, so each weight is read once, and
memory holds one layer and the states of the texts. Families and layers differ in the masks and
rotations with which transformers calls a layer, so this module does not rebuild the calls: the
model first runs with recorders in place of its layers, and the recorded calls are then made with
the real layers.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llmops.build.quantize import number_formats
from llmops.build.quantize.calibration import CACHED_LAYERS_BYTES
from llmops.build.quantize.embedding_tables import EMBEDDING, HEAD, DenseTable, EmbeddingTable
from llmops.build.quantize.exported_weights import ExportedModel, InputRounding
from llmops.build.quantize.model_loading import has_gpu, silence_libraries

_LAYERS = "model.layers."

LayerVisitor = Callable[[Mapping[str, Tensor]], None]


class ModelWeights(ABC):
    """A source of weights, by transformers' names. Each expert has names of its own."""

    @abstractmethod
    def layer(self, shapes: Mapping[str, tuple[int, ...]]) -> ExportedModel:
        """Return the weights with the names of `shapes`, in float32.

        Raises:
            CheckpointError, BuildError: A weight is missing or has another shape.
        """

    @abstractmethod
    def table(self, name: str) -> EmbeddingTable | None:
        """Return the embedding or the output matrix.

        The result is None for an output matrix that is the embedding itself.
        """


class LayerwiseModel:
    """A model that is read layer by layer and computes in float32.

    `module` is a transformers model without memory for its weights.
    """

    def __init__(self, module: Any, weights: ModelWeights) -> None:
        self.module, self.weights = module, weights
        self.device = torch.device("cuda" if has_gpu() else "cpu")
        self.inputs: dict[str, InputRounding] = {}
        self._layers = module.get_decoder().layers
        self._shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
        self._cache: dict[int, ExportedModel] = {}
        self._room = _bytes_to_keep(self.device)
        self._hooks = contextlib.ExitStack()
        embedding = weights.table(EMBEDDING)
        assert embedding is not None
        self.tables = {EMBEDDING: embedding}
        head = weights.table(HEAD)
        if head is not None:
            self.tables[HEAD] = head
        self._prepare(embedding, head or embedding)

    def _prepare(self, embedding: EmbeddingTable, head: EmbeddingTable) -> None:
        for module in self.module.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, buffer.to(self.device), name not in module._non_persistent_buffers_set)
        self.module.lm_head = _BlockwiseHead(self._kept(head))
        _read_rows(self.module.get_input_embeddings(), embedding)
        outer = {name: shape for name, shape in self._shapes.items() if not name.startswith(_LAYERS)}
        self.outer = self.weights.layer({name: outer[name] for name in outer if name not in (EMBEDDING, HEAD)}).weights
        self._put(self.outer)

    def _kept(self, table: EmbeddingTable) -> EmbeddingTable:
        """Return the output matrix, in the device's memory if it fits: each token reads it."""
        size = table.shape[0] * table.shape[1] * 4
        if size > self._room or (isinstance(table, DenseTable) and self.device.type == "cpu"):
            return table
        self._room -= size
        matrix, start = torch.empty(table.shape, device=self.device), 0
        for block in table.blocks():
            matrix[start : start + len(block)] = block
            start += len(block)
        return DenseTable(matrix)

    def log_probs(self, texts: Sequence[list[int]], visit: LayerVisitor | None = None) -> Iterator[Tensor]:
        """Yield for each text the log-probabilities of each token after the first.

        The log-probabilities are float32 tensors (tokens - 1, vocabulary) on the CPU. `visit` is
        called with the weights of each layer while the layer is in memory.
        """
        stubs = [_LayerStub(layer) for layer in self._layers]
        with self._stubbed(stubs):
            for ids in texts:
                self._record(ids)
        states = self._run(stubs, visit)
        for ids, state in zip(texts, states, strict=True):
            stubs[-1].result = state
            with self._stubbed(stubs):
                found = torch.log_softmax(self._logits(ids)[0, :-1].float(), dim=-1).cpu()
            yield found

    def _record(self, ids: list[int]) -> None:
        self.module.get_decoder()(torch.tensor([ids], device=self.device), use_cache=False)

    def _logits(self, ids: list[int]) -> Tensor:
        logits: Tensor = self.module(torch.tensor([ids], device=self.device), use_cache=False).logits
        return logits

    def _run(self, stubs: Sequence[_LayerStub], visit: LayerVisitor | None) -> list[Any]:
        """Return the output of the last layer for each text."""
        states = [call[0] for call in stubs[0].calls]
        results: list[Any] = []
        for index, stub in enumerate(stubs):
            with self._loaded(index) as weights:
                if visit is not None:
                    visit(weights)
                calls = zip(states, stub.calls, strict=True)
                with torch.inference_mode(), silence_libraries():
                    results = [self._layers[index](state, *args, **kwargs) for state, (_, args, kwargs) in calls]
            states = [result[0] if isinstance(result, tuple) else result for result in results]
            stub.calls.clear()
        return results

    @contextlib.contextmanager
    def _stubbed(self, stubs: Sequence[_LayerStub]) -> Iterator[None]:
        """Replace the decoder's layers by stubs inside the block."""
        decoder = self.module.get_decoder()
        decoder.layers = nn.ModuleList(stubs)
        try:
            with torch.inference_mode(), silence_libraries():
                yield
        finally:
            decoder.layers = self._layers

    @contextlib.contextmanager
    def generating(self) -> Iterator[Any]:
        """Yield the module for generation: each layer is read when it is called."""
        contexts: dict[int, Any] = {}

        def begin(index: int, *args: Any) -> None:
            contexts[index] = self._loaded(index)
            contexts[index].__enter__()

        def end(index: int, *args: Any) -> None:
            contexts.pop(index).__exit__(None, None, None)

        with contextlib.ExitStack() as hooks:
            for index, layer in enumerate(self._layers):
                hooks.enter_context(layer.register_forward_pre_hook(partial(begin, index)))
                hooks.enter_context(layer.register_forward_hook(partial(end, index)))
            yield self.module

    @contextlib.contextmanager
    def _loaded(self, index: int) -> Iterator[Mapping[str, Tensor]]:
        """Load a layer's weights and rounding hooks inside the block."""
        found = self._cache.get(index)
        if found is None:
            prefix = f"{_LAYERS}{index}."
            found = self.weights.layer({name: at for name, at in self._shapes.items() if name.startswith(prefix)})
            self._cache_if_small(index, found)
        self._put(found.weights)
        self._round(found)
        try:
            yield found.weights
        finally:
            self._put({name: torch.empty_like(value, device="meta") for name, value in found.weights.items()})
            self._hooks.close()

    def _cache_if_small(self, index: int, found: ExportedModel) -> None:
        # An export is read into the memory of the CPU, also if the source was on a GPU.
        on_device = all(value.device.type == self.device.type for value in found.weights.values())
        room = self._room if on_device else CACHED_LAYERS_BYTES
        size = sum(value.numel() * 4 for layer in (*self._cache.values(), found) for value in layer.weights.values())
        if size <= room:
            self._cache[index] = found

    def _put(self, weights: Mapping[str, Tensor]) -> None:
        for name, value in weights.items():
            path, _, attribute = name.rpartition(".")
            module = self.module.get_submodule(path)
            moved = value if value.is_meta else value.to(self.device)
            if attribute in module._buffers:
                module._buffers[attribute] = moved
            else:
                setattr(module, attribute, nn.Parameter(moved, requires_grad=False))

    def _round(self, found: ExportedModel) -> None:
        self.inputs |= found.inputs
        for name, rounding in found.inputs.items():
            with contextlib.suppress(AttributeError):
                module = self.module.get_submodule(name)
                self._hooks.enter_context(module.register_forward_pre_hook(_input_hook(rounding)))
        for name, (kind, scale) in found.kv_scales.items():
            with contextlib.suppress(AttributeError):
                module = self.module.get_submodule(name)
                self._hooks.enter_context(module.register_forward_hook(_output_hook(kind, scale)))


def _bytes_to_keep(device: torch.device) -> int:
    """Return the bytes of float32 weights to keep instead of reading them again for each token.

    The result is half of the free memory of a GPU, or CACHED_LAYERS_BYTES on a CPU.
    """
    if device.type == "cpu":
        return CACHED_LAYERS_BYTES
    free, _ = torch.cuda.mem_get_info()
    return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) // 2


class _LayerStub(nn.Module):
    """A stub that records the calls of a decoder layer.

    A call returns the hidden states that it gets, or `result` once `result` is set.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)
        self.calls: list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = []
        self.result: Any = None

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.result is not None:
            return self.result
        self.calls.append((hidden, args, kwargs))
        return hidden

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the real layer: some decoders read a layer's kind of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "layer"), name)


class _BlockwiseHead(nn.Module):
    """An output matrix that multiplies one block of rows at a time, to save memory."""

    def __init__(self, table: EmbeddingTable) -> None:
        super().__init__()
        self.table = table

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat([hidden @ block.to(hidden.device).T for block in self.table.blocks()], dim=-1)


def _read_rows(embedding: Any, table: EmbeddingTable) -> None:
    """Make an embedding read only the rows of the requested tokens, at each call."""

    def fetch(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        needed, stubs = torch.unique(inputs[0], return_inverse=True)
        rows = table.rows(needed.cpu().numpy()).to(inputs[0].device)
        module.weight = nn.Parameter(rows, requires_grad=False)
        return (stubs,)

    embedding.padding_idx = None
    embedding.register_forward_pre_hook(fetch)


def _input_hook(rounding: InputRounding) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    return lambda module, inputs: (rounding.apply(inputs[0]), *inputs[1:])


def _output_hook(kind: str, scale: Tensor) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """Return a hook that rounds the keys or values of a projection to E4M3 or INT8 (`kind`).

    The hook rounds keys before their rotation. TensorRT-LLM rounds keys after the rotation, with
    errors of the same size.
    """
    round_to = number_formats.round_to_e4m3 if kind == "e4m3" else number_formats.round_to_int8
    return lambda module, inputs, output: round_to(output, scale.to(output))
