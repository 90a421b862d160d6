"""The source checkpoint as a model that is read layer by layer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from llmops.build.checkpoint import Checkpoint
from llmops.build.checkpoint.weights import WeightSource, open_weights
from llmops.build.quality.layered import Layered, ModelWeights
from llmops.build.quantize.experts import split_experts
from llmops.build.quantize.loading import empty_model, source_config
from llmops.build.quantize.reading import ExportedModel
from llmops.build.quantize.tables import EMBEDDING, HEAD, StoredTable, Table, kept

# modules of transformers 5 -> what some checkpoints call them
_OLDER = ((".mlp.", ".block_sparse_moe."),)


def open_source(checkpoint: Checkpoint) -> Layered:
    """Raises CheckpointError, now or when a layer is read, for weights that are missing or not plain numbers."""
    module = empty_model(source_config(checkpoint))
    split_experts(module)
    return Layered(module, _SourceWeights(checkpoint, bool(module.config.tie_word_embeddings)))


class _SourceWeights(ModelWeights):
    def __init__(self, checkpoint: Checkpoint, tied: bool) -> None:
        self.weights: WeightSource = open_weights(checkpoint)
        self.tied = tied

    def layer(self, shapes: Mapping[str, tuple[int, ...]]) -> ExportedModel:
        found = ExportedModel()
        for name in shapes:
            value = self.weights.get(self._stored(name)).float32()
            # a copy: what is read must not keep the file's pages
            found.weights[name] = torch.from_numpy(np.array(value, np.float32, order="C"))
        self.weights.forget()
        return found

    def table(self, name: str) -> Table | None:
        if name == HEAD and self.tied:
            return None
        assert name in (EMBEDDING, HEAD)
        return kept(StoredTable([self.weights.get(name)]))

    def _stored(self, name: str) -> str:
        older = [name.replace(ours, theirs) for ours, theirs in _OLDER]
        return next((one for one in (name, *older) if self.weights.has(one)), name)
