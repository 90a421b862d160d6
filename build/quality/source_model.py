"""The source checkpoint as a model that is read layer by layer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from llmops.build.checkpoint import Checkpoint
from llmops.build.checkpoint.weight_sources import Weight, WeightSource, open_weights
from llmops.build.quality.layerwise_model import LayerwiseModel, ModelWeights
from llmops.build.quantize.embedding_tables import EMBEDDING, HEAD, EmbeddingTable, StoredTable, cache_if_small
from llmops.build.quantize.expert_split import split_experts
from llmops.build.quantize.exported_weights import ExportedModel
from llmops.build.quantize.model_loading import empty_model, has_gpu, source_config

# modules of transformers 5 -> what some checkpoints call them
_OLDER = ((".mlp.", ".block_sparse_moe."),)


def open_source(checkpoint: Checkpoint) -> LayerwiseModel:
    """Raises CheckpointError, now or when a layer is read, for weights that are missing or not plain numbers."""
    module = empty_model(source_config(checkpoint))
    split_experts(module)
    return LayerwiseModel(module, _SourceWeights(checkpoint, bool(module.config.tie_word_embeddings)))


class _SourceWeights(ModelWeights):
    def __init__(self, checkpoint: Checkpoint, tied: bool) -> None:
        self.weights: WeightSource = open_weights(checkpoint)
        self.tied = tied
        self.device = "cuda" if has_gpu() else "cpu"

    def layer(self, shapes: Mapping[str, tuple[int, ...]]) -> ExportedModel:
        found = ExportedModel()
        for name in shapes:
            found.weights[name] = _float32(self.weights.get(self._stored(name)), self.device)
        self.weights.forget()
        return found

    def table(self, name: str) -> EmbeddingTable | None:
        if name == HEAD and self.tied:
            return None
        assert name in (EMBEDDING, HEAD)
        return cache_if_small(StoredTable([self.weights.get(name)]))

    def _stored(self, name: str) -> str:
        older = [name.replace(ours, theirs) for ours, theirs in _OLDER]
        return next((one for one in (name, *older) if self.weights.has(one)), name)


def _float32(weight: Weight, device: str) -> Tensor:
    """A copy, so that nothing keeps the file's pages. 16-bit numbers cross to a GPU as they are, and widen there."""
    if weight.blocks:
        return torch.from_numpy(np.array(weight.float32(), order="C")).to(device)
    bits = weight.data.view(np.int16) if weight.element == "bf16" else weight.data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the file is read-only: it is only read
        stored = torch.from_numpy(bits)
    if weight.element == "bf16":
        stored = stored.view(torch.bfloat16)
    return stored.to(device, torch.float32, copy=True)
