"""Check that the GPUs of --gpu can run the engine."""

from llmops.build.model.families import FAMILIES
from llmops.build.plan.gpu_specs import GpuSpec, find_gpu
from llmops.build.quant_formats import FORMATS, missing_kernels, missing_kv_kernels
from llmops.build.targets.nvidia.build_request import BuildRequest, allowed_formats
from llmops.build.targets.nvidia.prequantized import stored_kv_cache
from llmops.build.targets.nvidia.stage_estimates import stored_bytes
from llmops.errors import InputError

_GIB = 2**30


def check_gpu(request: BuildRequest) -> None:
    """Raise InputError if the GPUs of --gpu cannot run the format, or cannot hold the weights."""
    spec, arch = request.spec, request.checkpoint.architecture
    _check_experts_dtype(request)
    if spec.gpu is None:
        return
    gpu, count = find_gpu(spec.gpu), spec.tp * spec.pp
    precision = FORMATS.get(request.weights, FORMATS["none"])
    if gpu.sm < precision.sm:
        others = (name for name in allowed_formats(arch.family, spec.target) if FORMATS[name].sm <= gpu.sm)
        raise InputError(
            f"--gpu {gpu.name} has no FP8 arithmetic, which {precision.label} weights need; use a newer GPU, or "
            f"--quant {', '.join(others)}{' of the full-precision checkpoint' if request.is_prequantized else ''}."
        )
    _check_blackwell(request, gpu)
    if missing := missing_kernels(precision, gpu.sm, arch.moe is not None, arch.mla is not None):
        source = " of the full-precision checkpoint" if request.is_prequantized else ""
        remedy = "" if FAMILIES[arch.family].as_published else f"use --quant fp8{source}, or "
        raise InputError(
            f"On --gpu {gpu.name}, TensorRT-LLM has no kernels for {missing}; {remedy}name an H100 or H200."
        )
    if missing := missing_kv_kernels(request.kv_cache, gpu.sm, arch.head_dim, arch.family):
        remedy = "use --kv-cache auto"
        if request.is_prequantized and stored_kv_cache(request.checkpoint.quantisation) == request.kv_cache:
            # --kv-cache auto would keep the cache that the checkpoint names
            remedy = f"name {'an H100 or H200' if gpu.sm >= 100 else 'a B200'}, or give another checkpoint"
        raise InputError(f"On --gpu {gpu.name}, TensorRT-LLM has no {missing}; {remedy}.")
    stored = stored_bytes(request)
    if stored > count * gpu.memory:
        raise InputError(
            f"The weights take {stored / _GIB:.0f} GiB, and {count} x {gpu.name} have {count * gpu.memory / _GIB:.0f} "
            "GiB; raise --tp or --pp, name a larger --gpu, or choose a --quant of fewer bits."
        )


def _check_experts_dtype(request: BuildRequest) -> None:
    """Raise InputError for experts in W4A8 in the wrong 16-bit dtype.

    TensorRT-LLM loads such experts and computes wrong results: it writes their scales as bfloat16
    on Hopper and as float16 on Ada, and reads the bits in the model's dtype
    (`tensorrt_llm/_torch/modules/fused_moe/quantization.py`,
    WInt4AFP8FusedMoEMethod.load_quant_scales).
    """
    if request.weights != "w4a8_awq" or request.checkpoint.architecture.moe is None:
        return
    ada = request.spec.gpu is not None and find_gpu(request.spec.gpu).sm == 89
    required = "float16" if ada else "bfloat16"
    if request.dtype != required:
        remedy = (
            "give such a checkpoint" if request.is_prequantized else f"add --set dtype={required}, or use --quant fp8"
        )
        raise InputError(
            f"--target pytorch computes w4a8_awq experts correctly in {required} only on "
            f"{'Ada' if ada else 'Hopper'}, and "
            f"this model is {request.dtype}; {remedy}."
        )


def _check_blackwell(request: BuildRequest, gpu: GpuSpec) -> None:
    """Raise InputError for a Blackwell GPU for which TensorRT-LLM makes no such engine.

    Source of what trtllm-build makes: `build` of `tensorrt_llm/builder.py` at 1.2.1.
    """
    narrow = not request.quant_format.blackwell_engine or request.kv_cache == "int8"
    if request.spec.target == "tensorrt" and 100 <= gpu.sm < 120 and narrow:
        raise InputError(
            f"For --gpu {gpu.name}, trtllm-build makes engines only with --quant none or fp8, and --kv-cache auto or "
            "fp8; choose those, or --target pytorch."
        )
