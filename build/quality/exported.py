"""A model as the exported files describe it: dequantised weights, rounded inputs, and the exported architecture.

It is built from what lies on disk, not from the model that was quantised, so wrong scales, swapped shards and a wrong
number of experts in config.json all show.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmops.build.checkpoint import Checkpoint
from llmops.build.quantize import numbers
from llmops.build.quantize.experts import split_experts
from llmops.build.quantize.hf_files import HfFiles
from llmops.build.quantize.loading import has_gpu, quiet
from llmops.build.quantize.rank_files import RankFiles
from llmops.build.quantize.reading import ExportedModel, InputRounding
from llmops.errors import BuildError


def load_exported(folder: Path, target: str, checkpoint: Checkpoint) -> Any:
    """A transformers model that computes what the export says. Raises BuildError when files and architecture do not
    fit together."""
    family = checkpoint.architecture.family
    files: RankFiles | HfFiles = RankFiles(folder, family) if target == "tensorrt" else HfFiles(folder)
    exported = files.model(bounds=False)
    config = _engine_architecture(checkpoint, files.config) if target == "tensorrt" else _hf_architecture(folder)
    model = _empty_model(config)
    _load(model, exported)
    _round_inputs(model, exported)
    return model.eval()


def _source_config(checkpoint: Checkpoint) -> Any:
    from transformers import AutoConfig

    if checkpoint.format == "gguf":
        return AutoConfig.from_pretrained(checkpoint.path.parent, gguf_file=checkpoint.path.name)
    return AutoConfig.from_pretrained(checkpoint.path)


def _engine_architecture(checkpoint: Checkpoint, exported: dict[str, Any]) -> Any:
    """The source's config with every field that the engine takes from its own config.json put in its place."""
    with quiet():
        config = _source_config(checkpoint)
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


def _empty_model(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with quiet():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    split_experts(model)
    return model.to("cuda") if has_gpu() else model


def _load(model: Any, exported: ExportedModel) -> None:
    wanted = dict(model.named_parameters())
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    missing = sorted(set(wanted) - set(exported.weights) - tied)
    foreign = sorted(set(exported.weights) - set(wanted) - tied)
    if missing or foreign:
        first = f"it lacks {missing[0]}" if missing else f"it has {foreign[0]}, which the architecture has not"
        raise BuildError(f"the exported checkpoint does not fit its architecture: {first}.")
    with torch.no_grad():
        for name, parameter in wanted.items():
            _copy(name, parameter, exported.weights.pop(name, None))


def _copy(name: str, parameter: nn.Parameter, value: Tensor | None) -> None:
    if value is None:
        return
    if value.shape != parameter.shape:
        raise BuildError(f"the exported {name} is {tuple(value.shape)}, its architecture has {tuple(parameter.shape)}.")
    parameter.copy_(value)


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
