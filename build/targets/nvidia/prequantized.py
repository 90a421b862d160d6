"""Checkpoints that are quantised already.

The module knows which target builds such a checkpoint unchanged, and which checkpoint or option to
give otherwise.
"""

from collections.abc import Callable

from llmops.build.checkpoint import Checkpoint
from llmops.build.checkpoint.description import ExistingQuantisation, compressed_tensors_algorithm
from llmops.build.checkpoint.file_checks import reject_odd_settings
from llmops.build.checkpoint.huggingface_folder import MODELOPT_FILE
from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.spec import BuildSpec
from llmops.build.trtllm.unsupported_checkpoints import unsupported_reason
from llmops.errors import CheckpointError, InputError

#: Compute capabilities of Hopper, 9.0, and of the first Blackwell GPUs, 10.0, as SM numbers.
_HOPPER, _BLACKWELL = 90, 100
#: The only block size of FP8 scales that TensorRT-LLM supports.
_BLOCK = [128, 128]
#: Methods of quantised checkpoints -> the most similar value of --quant, for error messages.
_NEAREST = {"fp8": "fp8", "awq": "int4_awq", "gptq": "int4_awq", "bitsandbytes": "int4_awq"}


def is_prequantized(spec: BuildSpec, checkpoint: Checkpoint, minor: tuple[int, int]) -> bool:
    """Return True if the checkpoint is already quantised, and is exported unchanged.

    `minor` is the release line of TensorRT-LLM for which the engine is built.

    Raises:
        CheckpointError: The checkpoint is quantised in a way that cannot be built.
        InputError: --quant would quantise the checkpoint twice.
    """
    found = checkpoint.kept_quantisation
    if found is None:
        return False
    with reject_odd_settings(checkpoint.ref):
        problem = _problem(found, checkpoint, spec, minor)
    if problem:
        raise CheckpointError(
            f"{checkpoint.ref} is already quantised ({_name(found)}), {problem}"
            f"{'' if problem.endswith(', or') else ';'} give the full-precision checkpoint{_alternative_source(found)}."
        )
    if spec.quant != "none":
        raise InputError(
            f"{checkpoint.ref} is already quantised ({_name(found)}) and is built unchanged; leave out --quant "
            f"{spec.quant}."
        )
    return True


def stored_kv_cache(found: ExistingQuantisation | None) -> str | None:
    """Return the dtype of the KV cache that a ModelOpt checkpoint names, in llmops' names, or None.

    With --kv-cache auto, the backend uses this dtype.
    """
    fp8 = found is not None and found.method == "modelopt" and found.kv_cache_algorithm == "FP8"
    return "fp8" if fp8 else None


def _name(found: ExistingQuantisation) -> str:
    algorithm = found.detail.get("quant_algo") if found.method == "modelopt" else None
    return f"{found.method} {algorithm}" if algorithm else found.method


def _alternative_source(found: ExistingQuantisation) -> str:
    if found.method == "compressed-tensors":
        return f" with --quant {'int4_awq' if found.bits == 4 else 'fp8'}"
    return f" with --quant {_NEAREST[found.method]}" if found.method in _NEAREST else " and choose --quant"


def _problem(found: ExistingQuantisation, checkpoint: Checkpoint, spec: BuildSpec, minor: tuple[int, int]) -> str:
    if spec.target == "tensorrt":
        return "which --target tensorrt cannot take"
    rule = _PYTORCH.get(found.method)
    if rule is None:
        return f"which {_BACKEND} does not load"
    problem = rule(found, checkpoint, spec, minor)
    known = found.format
    if problem or known is None:
        return problem
    rejected = unsupported_reason(checkpoint.architecture.family, known.algorithm)
    return f"which {_BACKEND} does not load: {rejected.reason}" if rejected else ""


_BACKEND = "TensorRT-LLM's PyTorch backend"
_NEWER = "which TensorRT-LLM reads since 1.3: use --set image=trtllm-1.3, or"
# The checks below follow how the PyTorch backend of each release reads config.json and
# hf_quant_config.json: `tensorrt_llm/_torch/model_config.py`, load_hf_quant_config, and
# `tensorrt_llm/llmapi/llm_utils.py`, _update_from_hf_quant_config. NVIDIA/TensorRT-LLM #14088
# added ModelOpt's description in config.json and the description of ModelOpt 1.x, and #15415 added
# the last fixes for compressed-tensors. Both are in 1.3.0rc29. Each function returns a problem as
# text, or an empty text.


#: Algorithms of hf_quant_config.json for which 1.2.1 has a kind of linear layer
#: (`tensorrt_llm/_torch/modules/linear.py`, get_quant_method), and the prefixes of the algorithms
#: of `tensorrt_llm/quantization/mode.py`, QuantAlgo, for which it raises "unsupported quant mode".
_ALGORITHMS = frozenset({
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_BLOCK_SCALES", "fp8_pb_wo", "W8A16", "W4A16", "W4A16_AWQ", "W4A8_AWQ",
    "NVFP4", "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8", "W4A8_MXFP4_MXFP8", "W4A16_MXFP4", "MIXED_PRECISION",
})  # fmt: skip
_NO_METHOD = ("W8A8_SQ", "W4A8_QSERVE", "W8A16_GPTQ", "W4A16_GPTQ")
#: Algorithms whose layers divide the number of their inputs by `group_size`, to get the number of
#: scales (`tensorrt_llm/_torch/modules/linear.py`, create_weights). ModelOpt 0.47 writes the size
#: to hf_quant_config.json, not to config.json.
_GROUPED = ("W4A16_AWQ", "W4A8_AWQ")


def _fp8(found: ExistingQuantisation, checkpoint: Checkpoint, spec: BuildSpec, minor: tuple[int, int]) -> str:
    block = found.detail.get("weight_block_size")
    if block == _BLOCK:
        return ""
    sizes = block if isinstance(block, list) else []
    scales = f"in blocks of {' x '.join(map(str, sizes))}" if sizes else "with one scale per tensor"
    return f"{scales}, where TensorRT-LLM's PyTorch backend supports only blocks of 128 x 128"


def _modelopt(found: ExistingQuantisation, checkpoint: Checkpoint, spec: BuildSpec, minor: tuple[int, int]) -> str:
    within, flat = not (checkpoint.path / MODELOPT_FILE).is_file(), "producer" in found.detail
    if minor < (1, 3) and within:
        return f"but TensorRT-LLM 1.2 reads the format from {MODELOPT_FILE}, which is missing"
    if minor < (1, 3) and flat:
        return f"and {MODELOPT_FILE} is of ModelOpt 1.x, {_NEWER}"
    if not found.detail.get("quant_algo"):
        return "but names no quant_algo, without which TensorRT-LLM refuses it"
    for algorithm in sorted(found.algorithms):
        layers = "" if algorithm == found.detail["quant_algo"] else f"with layers in {algorithm}, "
        if algorithm.startswith(_NO_METHOD) or (minor < (1, 3) and algorithm not in _ALGORITHMS):
            return f"{layers}which {_BACKEND} does not load"
        # 1.3.0rc29 runs NVIDIA's Nemotron 3 in NVFP4 on Hopper, too, and says so of no other model
        # (deployment-guide-for-nemotron-3-on-trtllm, "W4A16 fallback path").
        oldest = _HOPPER if checkpoint.architecture.family == "nemotron_h" else _BLACKWELL
        if "FP4" in algorithm and spec.gpu is not None and find_gpu(spec.gpu).sm < oldest:
            return f"{layers}which needs a Blackwell GPU, not --gpu {spec.gpu}"
    if found.detail["quant_algo"] in _GROUPED and not found.detail.get("group_size"):
        return f"but names no group_size, without which {_BACKEND} does not start"
    return _modelopt_cache(str(found.kv_cache_algorithm or "none"), spec)


def _modelopt_cache(algorithm: str, spec: BuildSpec) -> str:
    """Return the problem of the KV cache's `algorithm` in the description, or an empty text.

    `_torch/pyexecutor/model_loader.py`, validate_and_set_kv_cache_quant, accepts only the
    checkpoint's dtype or `auto`.
    """
    if algorithm.lower() in ("none", "null"):
        return ""
    if algorithm not in ("FP8", "NVFP4"):
        return f"with a KV cache in {algorithm}, which {_BACKEND} does not have"
    if algorithm == "NVFP4" and spec.gpu is not None and find_gpu(spec.gpu).sm < _BLACKWELL:
        return f"with a KV cache in NVFP4, which needs a Blackwell GPU, not --gpu {spec.gpu}"
    if algorithm == "NVFP4" and spec.kv_cache != "auto":
        return f"with a KV cache in NVFP4: leave out --kv-cache {spec.kv_cache}, or"
    return ""


def _mxfp4(found: ExistingQuantisation, checkpoint: Checkpoint, spec: BuildSpec, minor: tuple[int, int]) -> str:
    return "" if checkpoint.architecture.family == "gpt_oss" else "which runs for gpt_oss only"


def _compressed(found: ExistingQuantisation, checkpoint: Checkpoint, spec: BuildSpec, minor: tuple[int, int]) -> str:
    if compressed_tensors_algorithm(found.detail) is None:
        return f"which {_BACKEND} does not load"
    if minor < (1, 3):
        return _NEWER
    if any(str(name).startswith("re:") for name in found.detail.get("ignore") or ()):
        return f"with exceptions given as patterns (re:…), where {_BACKEND} takes names"
    return ""


_Rule = Callable[[ExistingQuantisation, Checkpoint, BuildSpec, tuple[int, int]], str]
_PYTORCH: dict[str, _Rule] = {"fp8": _fp8, "modelopt": _modelopt, "mxfp4": _mxfp4, "compressed-tensors": _compressed}
