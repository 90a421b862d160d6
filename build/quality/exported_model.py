"""A model as the exported files describe it, layer by layer: dequantised weights, rounded inputs, the exported
architecture.

It is built from what lies on disk, not from the model that was quantised, so wrong scales, swapped shards and a wrong
number of experts in config.json all show.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmops.build.checkpoint import Checkpoint
from llmops.build.quality.config_checks import check_engine_config, check_hf_config
from llmops.build.quality.layerwise_model import LayerwiseModel, ModelWeights
from llmops.build.quantize.embedding_tables import HEAD, EmbeddingTable
from llmops.build.quantize.expert_split import split_experts
from llmops.build.quantize.exported_weights import ExportedModel
from llmops.build.quantize.hf_checkpoint_reader import HfCheckpointReader
from llmops.build.quantize.model_loading import empty_model, silence_libraries, source_config
from llmops.build.quantize.rank_file_reader import RankFileReader
from llmops.errors import BuildError


def load_exported(folder: Path, target: str, checkpoint: Checkpoint) -> LayerwiseModel:
    """Raises BuildError when files, architecture and source do not fit together."""
    if target == "tensorrt":
        stored: RankFileReader | HfCheckpointReader = RankFileReader(
            folder, checkpoint.architecture.family, bounds=False
        )
        check_engine_config(stored.config, checkpoint.architecture, checkpoint.config)
        config = _engine_architecture(checkpoint, stored.config)
    else:
        stored = HfCheckpointReader(folder, bounds=False)
        check_hf_config(stored.config, checkpoint.config)
        config = _hf_architecture(folder)
    head = stored.table(HEAD)
    config.tie_word_embeddings = head is None
    module = empty_model(config)
    split_experts(module)
    return LayerwiseModel(module, _ExportedWeights(stored, head))


def _engine_architecture(checkpoint: Checkpoint, exported: dict[str, Any]) -> Any:
    """The source's config with every field that the engine takes from its own config.json put in its place."""
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


def _hf_architecture(folder: Path) -> Any:
    from transformers import AutoConfig

    with silence_libraries():
        config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


class _ExportedWeights(ModelWeights):
    def __init__(self, stored: RankFileReader | HfCheckpointReader, head: EmbeddingTable | None) -> None:
        self.stored, self.head = stored, head

    def table(self, name: str) -> EmbeddingTable | None:
        found = self.head if name == HEAD else self.stored.table(name)
        if found is None and name != HEAD:
            raise _lacks(name)
        return found

    def layer(self, shapes: Mapping[str, tuple[int, ...]]) -> ExportedModel:
        found = self.stored.layer(sorted(shapes))
        missing, foreign = sorted(set(shapes) - set(found.weights)), sorted(set(found.weights) - set(shapes))
        if missing:
            raise _lacks(missing[0])
        if foreign:
            raise BuildError(f"{_UNFIT}: it has {foreign[0]}, which the architecture does not have. {_AGAIN}")
        for name, shape in shapes.items():
            if tuple(found.weights[name].shape) != shape:
                raise BuildError(
                    f"the exported {name} is {tuple(found.weights[name].shape)}, its architecture has {shape}. {_AGAIN}"
                )
        return found


_UNFIT = "the exported checkpoint does not fit its architecture"
_AGAIN = "Build again; if it stays, report it."


def _lacks(name: str) -> BuildError:
    return BuildError(f"{_UNFIT}: it lacks {name}. {_AGAIN}")
