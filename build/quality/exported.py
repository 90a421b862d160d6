"""A model as the exported files describe it: dequantised weights, rounded inputs, and the exported architecture.

It is built from what lies on disk, not from the model that was quantised, so wrong scales, swapped shards and a wrong
number of experts in config.json all show.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from llmops.build.checkpoint import Checkpoint
from llmops.build.quality.structure import check_engine_config, check_hf_config
from llmops.build.quantize import numbers
from llmops.build.quantize.experts import split_experts
from llmops.build.quantize.hf_files import HfFiles
from llmops.build.quantize.loading import empty_model, has_gpu, parameter_names, put_parameter, quiet, source_config
from llmops.build.quantize.rank_files import RankFiles
from llmops.build.quantize.reading import ExportedModel, InputRounding
from llmops.errors import BuildError


@dataclass(frozen=True)
class Exported:
    """`model` computes what the export says; `inputs` is how the input of each linear layer is rounded."""

    model: Any
    inputs: dict[str, InputRounding]


def load_exported(folder: Path, target: str, checkpoint: Checkpoint) -> Exported:
    """Raises BuildError when files, architecture and source do not fit together."""
    if target == "tensorrt":
        ranks = RankFiles(folder, checkpoint.architecture.family)
        check_engine_config(ranks.config, checkpoint.architecture, checkpoint.config)
        config, exported = _engine_architecture(checkpoint, ranks.config), ranks.model(bounds=False)
    else:
        files = HfFiles(folder)
        check_hf_config(files.config, checkpoint.config)
        config, exported = _hf_architecture(folder), files.model(bounds=False)
    if "lm_head.weight" in exported.weights:
        config.tie_word_embeddings = False
    model = empty_model(config)
    split_experts(model)
    _load(model, exported)
    _round_inputs(model, exported)
    return Exported(model.to("cuda") if has_gpu() else model, exported.inputs)


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

    with quiet():
        config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _load(model: Any, exported: ExportedModel) -> None:
    wanted = dict(model.named_parameters())
    names = parameter_names(model)
    missing, foreign = sorted(set(names) - set(exported.weights)), sorted(set(exported.weights) - set(names))
    if missing or foreign:
        first = f"it lacks {missing[0]}" if missing else f"it has {foreign[0]}, which the architecture has not"
        raise BuildError(f"the exported checkpoint does not fit its architecture: {first}.")
    for name in names:
        value, shape = exported.weights.pop(name), tuple(wanted[name].shape)
        if tuple(value.shape) != shape:
            raise BuildError(f"the exported {name} is {tuple(value.shape)}, its architecture has {shape}.")
        put_parameter(model, name, value)
    model.tie_weights()


def _round_inputs(model: nn.Module, exported: ExportedModel) -> None:
    for name, rounding in exported.inputs.items():
        with contextlib.suppress(AttributeError):
            model.get_submodule(name).register_forward_pre_hook(_input_hook(rounding))
    for name, (kind, scale) in exported.kv_scales.items():
        with contextlib.suppress(AttributeError):
            model.get_submodule(name).register_forward_hook(_output_hook(kind, scale))


def _input_hook(rounding: InputRounding) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    return lambda module, inputs: (rounding.apply(inputs[0]), *inputs[1:])


def _output_hook(kind: str, scale: Tensor) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """Keys are rounded before the rotation here, after it in TensorRT-LLM; rounding errors are of the same size."""
    round_to = numbers.round_to_e4m3 if kind == "e4m3" else numbers.round_to_int8
    return lambda module, inputs, output: round_to(output, scale.to(output))
