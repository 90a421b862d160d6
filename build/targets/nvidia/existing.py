"""Checkpoints that come quantised: which target takes them as they are, and what to give instead."""

from __future__ import annotations

from collections.abc import Callable

from llmops.build.checkpoint import Checkpoint
from llmops.build.checkpoint.base import ExistingQuantisation
from llmops.build.checkpoint.quantisation import MODELOPT_FILE
from llmops.build.plan.gpus import find_gpu
from llmops.build.spec import BuildSpec
from llmops.build.trtllm.loaders import rejection
from llmops.errors import CheckpointError, InputError

_BLACKWELL = 100
_BLOCK = [128, 128]
# what comes nearest to a format that is refused
_NEAREST = {"fp8": "fp8", "awq": "int4_awq", "gptq": "int4_awq", "bitsandbytes": "int4_awq"}


def passed_on(spec: BuildSpec, checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint is quantised and goes in unchanged. Raises CheckpointError for one that cannot, InputError
    for a --quant that would quantise it twice."""
    found = checkpoint.quantisation
    if found is None or found.method == "gguf":
        return False
    problem = _problem(found, checkpoint, spec)
    if problem:
        raise CheckpointError(
            f"{checkpoint.ref} is already quantised ({_name(found)}), {problem}; give the full-precision checkpoint"
            f"{_instead(found)}."
        )
    if spec.quant != "none":
        raise InputError(
            f"{checkpoint.ref} is already quantised ({_name(found)}) and is passed on as it is; leave out --quant "
            f"{spec.quant}."
        )
    return True


def _name(found: ExistingQuantisation) -> str:
    algorithm = found.detail.get("quant_algo") if found.method == "modelopt" else None
    return f"{found.method} {algorithm}" if algorithm else found.method


def _instead(found: ExistingQuantisation) -> str:
    if found.method == "compressed-tensors":
        return f" with --quant {'int4_awq' if found.bits == 4 else 'fp8'}"
    return f" with --quant {_NEAREST[found.method]}" if found.method in _NEAREST else " and choose --quant"


def _problem(found: ExistingQuantisation, checkpoint: Checkpoint, spec: BuildSpec) -> str:
    if spec.target == "tensorrt":
        return "which --target tensorrt cannot take"
    rule = _PYTORCH.get(found.method)
    return rule(found, checkpoint, spec) if rule else "which TensorRT-LLM's PyTorch backend does not load"


# What TensorRT-LLM 1.2's PyTorch backend makes of config.json and hf_quant_config.json
# (tensorrt_llm/_torch/model_config.py, load_hf_quant_config). Each answers with what is wrong, or nothing.


def _fp8(found: ExistingQuantisation, checkpoint: Checkpoint, spec: BuildSpec) -> str:
    block = found.detail.get("weight_block_size")
    if block == _BLOCK:
        return ""
    form = f"in blocks of {block[0]} x {block[1]}" if block else "with one scale per tensor"
    return f"{form}, where TensorRT-LLM's PyTorch backend takes blocks of 128 x 128 only"


def _modelopt(found: ExistingQuantisation, checkpoint: Checkpoint, spec: BuildSpec) -> str:
    if not (checkpoint.path / MODELOPT_FILE).is_file():
        return f"but TensorRT-LLM 1.2 reads that from {MODELOPT_FILE}, which is not there"
    algorithm = str(found.detail.get("quant_algo") or "")
    found_rejection = rejection(checkpoint.architecture.family, algorithm)
    if found_rejection is not None:
        return f"which TensorRT-LLM's PyTorch backend does not load: {found_rejection.reason}"
    if "FP4" in algorithm and spec.gpu is not None and find_gpu(spec.gpu).sm < _BLACKWELL:
        return f"which needs a Blackwell GPU, not --gpu {spec.gpu}"
    return ""


def _mxfp4(found: ExistingQuantisation, checkpoint: Checkpoint, spec: BuildSpec) -> str:
    return "" if checkpoint.architecture.family == "gpt_oss" else "which runs for gpt_oss only"


_Rule = Callable[[ExistingQuantisation, Checkpoint, BuildSpec], str]
_PYTORCH: dict[str, _Rule] = {"fp8": _fp8, "modelopt": _modelopt, "mxfp4": _mxfp4}
