"""Open the source checkpoint, and its export, as models that are read layer by layer."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmops.build.checkpoint import Checkpoint
from llmops.build.checkpoint.weight_sources import Weight, WeightSource, open_weights
from llmops.build.quality.config_checks import check_engine_config, check_hf_config
from llmops.build.quality.layerwise_model import LayerwiseModel, ModelWeights
from llmops.build.quantize.embedding_tables import EMBEDDING, HEAD, EmbeddingTable, StoredTable, cache_if_small
from llmops.build.quantize.exported_weights import ExportedModel
from llmops.build.quantize.hf_checkpoint_reader import HfCheckpointReader
from llmops.build.quantize.model_loading import empty_model, has_gpu, read_hf_config, source_config
from llmops.build.quantize.module_fixes import split_experts
from llmops.build.quantize.rank_file_reader import RankFileReader
from llmops.errors import BuildError

#: Module names of transformers 5 -> the names of these modules in some checkpoints.
_OLDER = ((".mlp.", ".block_sparse_moe."),)


def open_source(checkpoint: Checkpoint) -> LayerwiseModel:
    """Return the model of the source checkpoint.

    Raises:
        CheckpointError: Weights are missing or not plain numbers. The error is raised here, or when
            a layer is read.
    """
    module = empty_model(source_config(checkpoint))
    split_experts(module)
    return LayerwiseModel(module, _SourceWeights(checkpoint, bool(module.config.tie_word_embeddings)))


class _SourceWeights(ModelWeights):
    """The weights of the source checkpoint."""

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
        older = [name.replace(current, older_name) for current, older_name in _OLDER]
        return next((one for one in (name, *older) if self.weights.has(one)), name)


def _float32(weight: Weight, device: str) -> Tensor:
    """Return a float32 copy of a weight, so that no tensor keeps the file's pages in memory.

    16-bit numbers are copied to a GPU unchanged and converted there.
    """
    if weight.blocks:
        return torch.from_numpy(np.array(weight.float32(), order="C")).to(device)
    bits = weight.data.view(np.int16) if weight.element == "bf16" else weight.data
    with warnings.catch_warnings():
        # torch warns that the array is read-only, but nothing writes to this tensor.
        warnings.simplefilter("ignore")
        stored = torch.from_numpy(bits)
    if weight.element == "bf16":
        stored = stored.view(torch.bfloat16)
    return stored.to(device, torch.float32, copy=True)


def load_exported(folder: Path, target: str, checkpoint: Checkpoint) -> LayerwiseModel:
    """Return the model of an export, built only from the export's files.

    Wrong scales, swapped shards and wrong numbers in config.json therefore change the answers of
    the model.

    Raises:
        BuildError: Files, architecture and source do not fit together.
    """
    if target == "tensorrt":
        stored: RankFileReader | HfCheckpointReader = RankFileReader(folder, checkpoint.architecture.family)
        check_engine_config(stored.config, checkpoint.architecture, checkpoint.config)
        config = _engine_architecture(checkpoint, stored.config)
    else:
        stored = HfCheckpointReader(folder)
        check_hf_config(stored.config, checkpoint.config)
        config = read_hf_config(folder)
    head = stored.table(HEAD)
    config.tie_word_embeddings = head is None
    module = empty_model(config)
    split_experts(module)
    return LayerwiseModel(module, _ExportedWeights(stored, head))


def _engine_architecture(checkpoint: Checkpoint, exported: dict[str, Any]) -> Any:
    """Return the source's config with the engine's own fields replaced.

    The replaced fields are all fields that the engine reads from its own config.json.
    """
    config = source_config(checkpoint)
    config.rms_norm_eps = exported["norm_epsilon"]
    config.num_attention_heads = exported["num_attention_heads"]
    config.num_key_value_heads = exported["num_key_value_heads"]
    config.vocab_size = exported["vocab_size"]
    if "moe" in exported:
        config.num_experts_per_tok = exported["moe"]["top_k"]
    parameters = dict(config.rope_parameters)
    theta = parameters.get("full_attention", parameters)
    theta["rope_theta"] = exported["rotary_base"]
    if exported.get("rotary_scaling") is None and theta.get("rope_type") not in ("longrope", None):
        theta["rope_type"] = "default"
    config.rope_parameters = parameters
    return config


class _ExportedWeights(ModelWeights):
    """The dequantised weights of an export."""

    def __init__(self, stored: RankFileReader | HfCheckpointReader, head: EmbeddingTable | None) -> None:
        self.stored, self.head = stored, head

    def table(self, name: str) -> EmbeddingTable | None:
        found = self.head if name == HEAD else self.stored.table(name)
        if found is None and name != HEAD:
            raise _missing_error(name)
        return found

    def layer(self, shapes: Mapping[str, tuple[int, ...]]) -> ExportedModel:
        found = self.stored.layer(sorted(shapes))
        missing, unknown = sorted(set(shapes) - set(found.weights)), sorted(set(found.weights) - set(shapes))
        if missing:
            raise _missing_error(missing[0])
        if unknown:
            raise BuildError(f"{_UNFIT}: it has {unknown[0]}, which the architecture does not have. {_AGAIN}")
        for name, shape in shapes.items():
            if tuple(found.weights[name].shape) != shape:
                raise BuildError(
                    f"The exported {name} has the shape {tuple(found.weights[name].shape)} instead of {shape}. {_AGAIN}"
                )
        return found


_UNFIT = "The exported checkpoint does not fit its architecture"
_AGAIN = "Build again, and report this if it fails again."


def _missing_error(name: str) -> BuildError:
    return BuildError(f"{_UNFIT}: it lacks {name}. {_AGAIN}")
