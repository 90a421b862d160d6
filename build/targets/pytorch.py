"""Target pytorch: build a Hugging Face checkpoint that ModelOpt quantised.

The engine folder also has the frozen arguments of `tensorrt_llm.LLM`.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmops.build.checkpoint import Checkpoint
from llmops.build.checkpoint.file_checks import (
    file_state,
    open_checked,
    read_json,
    reject_changed_files,
    reject_odd_settings,
)
from llmops.build.checkpoint.hashing import remember_linked
from llmops.build.checkpoint.lora_adapters import AdapterCheckpoint, read_adapters
from llmops.build.engine_folder.build_stages import link_file, link_tree
from llmops.build.engine_folder.manifest_extras import PytorchExtra
from llmops.build.model.architecture import Architecture
from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.progress import Progress
from llmops.build.quality.quality_gates import user_limits
from llmops.build.quantize.hf_config import with_transformers4_keys
from llmops.build.spec import BuildSpec
from llmops.build.target_facts import TargetName
from llmops.build.targets.build_target import BuildResult, BuildTarget
from llmops.build.targets.nvidia.build_request import (
    COMMON_OPTIONS,
    BuildRequest,
    check_calibration,
    make_request,
    unknown_options,
)
from llmops.build.targets.nvidia.gpu_checks import check_gpu
from llmops.build.targets.nvidia.nvidia_job import NvidiaJob
from llmops.build.targets.nvidia.quantize_stages import quantised_checkpoint
from llmops.build.trtllm.backend_files import copy_adapters
from llmops.build.trtllm.extra_llm_options import contradiction, flat_options
from llmops.build.trtllm.image_selection import release_of
from llmops.build.trtllm.llm_args import make_llm_args
from llmops.build.trtllm.release_profiles import profile_of_release
from llmops.errors import InputError

LLM = "llm."
ARGS_FILE = "llm_args.json"
MODEL_DIR = "model"
#: Width and height of the blocks of weights that share a scale in fp8_block.
_BLOCK = 128
#: Tokens of a KV-cache block of latent attention on Hopper, and the compute capability of Hopper.
_MLA_BLOCK, _HOPPER = 64, 90


class PytorchTarget(BuildTarget[Checkpoint]):
    """The target pytorch.

    `--set llm.FIELD=VALUE` sets any LLM-API field; VALUE is JSON, or else text.
    """

    name: TargetName = "pytorch"

    def prepare(self, spec: BuildSpec, checkpoint: Checkpoint) -> PytorchJob:
        unknown_options(spec, COMMON_OPTIONS | {"adapters"}, (LLM,))
        request = make_request(spec, checkpoint)
        check_calibration(request)
        job = PytorchJob(request, read_adapters(spec.options.get("adapters"), checkpoint.architecture))
        check_gpu(request)
        _check_layout(request, job.arguments)
        _check_blocks(request, job.arguments)
        _check_model_limits(request, job.arguments)
        return job


def _check_model_limits(request: BuildRequest, arguments: Mapping[str, Any]) -> None:
    """Raise InputError if TensorRT-LLM serves this model otherwise than the arguments say."""
    architecture, gpu = request.checkpoint.architecture, request.spec.gpu
    # 1.3.0rc26, features/helix: "designed for generation servers in a disaggregated […] architecture";
    # `_torch/modules/attention.py` has no other kind.
    if (arguments.get("context_parallel_size") or 1) > 1:
        raise InputError(
            "llmops gives an engine --tp x --pp GPUs, and TensorRT-LLM's context parallelism is for decoding apart "
            "from prefill; leave llm.context_parallel_size out."
        )
    tokens = (arguments.get("kv_cache_config") or {}).get("tokens_per_block")
    later = release_of(request.image.tensorrt_llm) >= (1, 3)
    if architecture.mla is not None and tokens != _MLA_BLOCK and (gpu is None or find_gpu(gpu).sm == _HOPPER):
        raise InputError(
            f"On Hopper the KV-cache blocks of this model have {_MLA_BLOCK} tokens whatever is set; set "
            f"kv_cache_config.tokens_per_block to {_MLA_BLOCK}{'' if gpu else ', or name another GPU with --gpu'}."
        )
    # NVIDIA/TensorRT-LLM #10261; sparse attention has other kernels.
    dense = architecture.mla is not None and architecture.family != "deepseek_v32"
    if dense and tokens == _MLA_BLOCK and later and _is_blackwell(gpu):
        raise InputError(
            f"On --gpu {gpu}, TensorRT-LLM 1.3 has no kernels for KV-cache blocks of {_MLA_BLOCK} tokens of this "
            "model; leave llm.kv_cache_config.tokens_per_block out."
        )
    backend = (arguments.get("moe_config") or {}).get("backend") or ("AUTO" if later else "CUTLASS")
    if backend == "CUTLASS" and _has_block_experts_on_blackwell(request):
        raise InputError(
            f"On --gpu {gpu}, TensorRT-LLM's backend CUTLASS has no kernels for experts in FP8 blocks; add --set "
            "llm.moe_config.backend=DEEPGEMM."
        )
    # 1.2 `fused_moe_trtllm_gen.py`, "SM100 Blackwell only", and NVIDIA/TensorRT-LLM #17570, "fails at engine
    # init"; experts in other formats get CUTLASS instead (create_moe.py, get_moe_cls).
    gated = architecture.moe is not None and request.weights in ("fp8_block", "mxfp4")
    if backend == "TRTLLM" and gated and not later and gpu is not None and not 100 <= find_gpu(gpu).sm < 120:
        raise InputError(
            f"TensorRT-LLM {request.image.tensorrt_llm} has kernels of the backend TRTLLM for experts on a B200 only, "
            f"not on --gpu {gpu}; leave llm.moe_config.backend out."
        )
    # 1.3.0rc29, supported-models.md, footnote of Glm4MoeForCausalLM
    if architecture.family == "glm4_moe" and arguments.get("guided_decoding_backend") == "llguidance":
        raise InputError("llguidance does not work with GLM 4 in TensorRT-LLM; leave llm.guided_decoding_backend out.")
    # 1.3 `_torch/pyexecutor/py_executor.py`, "not supported with Mamba / hybrid linear-attention models"
    if architecture.recurrent and arguments.get("kv_connector_config"):
        raise InputError(
            f"TensorRT-LLM has no KV cache connector for {architecture.family}, whose recurrent layers keep no keys "
            "and values; leave llm.kv_connector_config out."
        )


def _check_layout(request: BuildRequest, arguments: Mapping[str, Any]) -> None:
    """Raise InputError for sizes that do not fit --tp, --pp or the layers (`tensorrt_llm/mapping.py`)."""
    spec, layers = request.spec, request.checkpoint.architecture.num_layers
    sizes = [arguments.get(f"moe_{kind}_parallel_size") or -1 for kind in ("tensor", "expert", "cluster")]
    given = math.prod(size for size in sizes if size != -1)
    if spec.tp % given or (-1 not in sizes[:2] and given != spec.tp):
        raise InputError(
            f"llm.moe_tensor_parallel_size and --ep must multiply to --tp {spec.tp}, not to {given}; leave "
            "llm.moe_tensor_parallel_size and llm.moe_cluster_parallel_size out."
        )
    stages = arguments.get("pp_partition")
    if stages is not None and (
        not all(isinstance(size, int) for size in stages) or len(stages) != spec.pp or sum(stages) != layers
    ):
        raise InputError(
            f"llm.pp_partition must have {spec.pp} numbers, as --pp, that add up to {layers} layers; leave it out."
        )
    if arguments.get("enable_lm_head_tp_in_adp") and not arguments.get("enable_attention_dp"):
        raise InputError("llm.enable_lm_head_tp_in_adp needs llm.enable_attention_dp=true; leave it out.")


def _check_blocks(request: BuildRequest, arguments: Mapping[str, Any]) -> None:
    """Raise InputError if ranks would split a block of 128 weights that share a scale.

    The backend would stop, or use the scales of other blocks
    (`_torch/modules/fused_moe/quantization.py`, "intermediate_size_per_partition should be
    divisible"; `_torch/modules/linear.py`, FP8BlockScalesLinearMethod). In models with experts,
    only experts and attention are checked: the backend itself splits dense layers less.
    """
    arch, tp, ep = request.checkpoint.architecture, request.spec.tp, request.spec.ep
    if request.weights != "fp8_block":
        return
    attention = 1 if arguments.get("enable_attention_dp") else tp
    if arch.moe is not None:
        width, parts = arch.moe.moe_intermediate_size, arguments.get("moe_tensor_parallel_size") or -1
        parts = tp // ep if parts == -1 else parts
    else:
        width, parts = arch.intermediate_size, attention
    _check_width(tp, "MLP", width, parts, _whole_blocks(arch, width, tp))
    # Queries, keys and values are one matrix, in which each part's blocks begin at the part's first
    # row.
    if arch.mla is None:
        keys = max(arch.num_kv_heads, attention) * arch.head_dim
        _check_width(tp, "keys", keys, attention, "use fewer GPUs, or a checkpoint in fp8")


def _check_width(tp: int, what: str, width: int, parts: int, remedy: str) -> None:
    if parts > 1 and width % (parts * _BLOCK):
        raise InputError(
            f"--tp {tp} would split the {what} of {width} into {parts} parts of {width / parts:g}, which must be "
            f"multiples of {_BLOCK} with FP8 in blocks; {remedy}."
        )


def _whole_blocks(arch: Architecture, width: int, tp: int) -> str:
    """Return advice on parallel sizes that split no block of `width` weights, as a clause.

    `width` is the number of weights along the split dimension, and `tp` the rejected size.
    """
    sizes = [size for size in range(1, tp + 1) if tp % size == 0 and width % (tp // size * _BLOCK) == 0]
    if arch.moe is not None:
        spread = [size for size in sizes if arch.moe.num_experts % size == 0]
        return f"add --ep {spread[0]}" if spread else "use fewer GPUs"
    return f"use --tp {tp // sizes[0] if sizes else 1}"


class PytorchJob(NvidiaJob):
    """A build for the PyTorch backend. `arguments` are the arguments of `tensorrt_llm.LLM`.

    Raises:
        InputError: The LLM API does not have a field or value.
    """

    def __init__(self, request: BuildRequest, adapters: list[AdapterCheckpoint]) -> None:
        super().__init__(request, adapters)
        self.arguments = llm_args(request, adapters)

    def commands(self) -> list[str]:
        arguments = json.dumps(self.arguments, indent=2)
        return [f"tensorrt_llm.LLM(model={self.spec.output / MODEL_DIR!s}, **{arguments})"]

    def build(self, workdir: Path, progress: Progress) -> BuildResult:
        record: dict[str, Any] = {"quality": None, "calibration_tokens": 0}
        model_dir = workdir / MODEL_DIR
        if self.request.exports_unchanged:
            with progress.stage("Linking the checkpoint"):
                _link_checkpoint(self.checkpoint, model_dir)
                if release_of(self.request.image.tensorrt_llm) < (1, 3):
                    with reject_odd_settings(self.checkpoint.ref):
                        _name_as_transformers4(model_dir / "config.json")
        else:
            folder, record = quantised_checkpoint(self.request, workdir / "tokenizer", progress)
            link_tree(folder / "checkpoint", model_dir)
        _add_tokenizer(workdir, model_dir)
        copy_adapters(self.adapters, workdir)
        (workdir / ARGS_FILE).write_text(json.dumps(self.arguments, indent=2) + "\n")
        return self.result(record, self.extra(record["calibration_tokens"]))

    def extra(self, calibration_tokens: int) -> PytorchExtra:
        return PytorchExtra(
            tensorrt_llm=self.request.image.tensorrt_llm,
            image=self.request.image.serving("pytorch"),
            llm_args=self.arguments,
            calibration_tokens=calibration_tokens,
            quality_limits=user_limits(self.spec.options),
            adapters=self.adapter_entries,
        )


def _link_checkpoint(checkpoint: Checkpoint, model_dir: Path) -> None:
    """Hard-link the checkpoint's files into the engine, and copy the files that a user may edit.

    An edit of a hard link would change the checkpoint.
    A link changes the time of a file's inode, so the state of the file is read again.

    Raises:
        CheckpointError: A file changed since the checkpoint's links were checked.
    """
    model_dir.mkdir()
    states = checkpoint.states
    for file in checkpoint.files:
        place = model_dir / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        reject_changed_files(checkpoint.path, states, {file.path: file.digest_if_linked})
        make = shutil.copy2 if file.is_copied else link_file
        with open_checked(file.location, checkpoint.path) as opened:
            make(f"/proc/self/fd/{opened.fileno()}", place)
        # A file with another inode is a copy, or was replaced since the check, so its old state
        # stays.
        known, linked = states.get(file.path), place.stat()
        if known is not None and (known.file.device, known.file.inode) == (linked.st_dev, linked.st_ino):
            states[file.path] = file_state(file.location)
            remember_linked(file.location, file.sha256)


def _name_as_transformers4(path: Path) -> None:
    """Add transformers 4's names to a config.json of transformers 5 (see quantize/hf_config.py)."""
    config = read_json(path)
    named = with_transformers4_keys(config)
    if named != config:
        path.unlink()
        path.write_text(json.dumps(named, indent=2) + "\n")


def _add_tokenizer(workdir: Path, model_dir: Path) -> None:
    """Link the tokenizer beside the weights, where `LLM(model=…)` reads it."""
    for file in (workdir / "tokenizer").iterdir():
        if not (model_dir / file.name).exists():
            link_file(file, model_dir / file.name)


def llm_args(request: BuildRequest, adapters: list[AdapterCheckpoint]) -> dict[str, Any]:
    """Return the arguments of `tensorrt_llm.LLM`.

    Raises:
        InputError: The image's version does not have a field or value.
    """
    spec = request.spec
    given = {name[len(LLM) :]: _value(text) for name, text in spec.options.items() if name.startswith(LLM)}
    overrides = dict(flat_options(given))
    for name in ("model", "tokenizer"):
        if name in overrides:
            raise InputError(
                f"--set llm.{name} is not possible, because the engine folder sets this field; leave it out."
            )
    for path, value in overrides.items():
        if fault := contradiction(spec, path, value):
            raise InputError(fault)
    if adapters:
        overrides = {**lora_fields(adapters, request.checkpoint.architecture.family), **overrides}
    if request.checkpoint.architecture.recurrent:
        # _torch/pyexecutor/mamba_cache_manager.py, MambaHybridCacheManager, asserts this value.
        overrides = {"kv_cache_config.enable_block_reuse": False, **overrides}
    is_sparse = request.checkpoint.architecture.family == "deepseek_v32"
    if request.checkpoint.architecture.mla is not None and (is_sparse or not _is_blackwell(spec.gpu)):
        # On Hopper, blocks have 64 tokens whatever is set (_torch/pyexecutor/py_executor_creator.py,
        # "for using FlashMLA"), and the events of the cache are read by the number that is set. On
        # Blackwell, NVIDIA/TensorRT-LLM #10261 (1.3.0rc0) removed the kernels of such blocks; the
        # README of DeepSeek V3.2 sets 64.
        overrides = {"kv_cache_config.tokens_per_block": _MLA_BLOCK, **overrides}
    if _has_block_experts_on_blackwell(request):
        # 1.3.0rc29, deployment-guide-for-deepseek-r1-on-trtllm, "MoE Backend Support Matrix". The
        # default of 1.2 is CUTLASS, which throws "fp8 blockscale gemm only support Hopper".
        overrides = {"moe_config.backend": "DEEPGEMM", **overrides}
    version, is_mixture = request.image.tensorrt_llm, request.checkpoint.architecture.moe is not None
    arguments = make_llm_args(
        request.limits, request.parallelism, request.kv_cache, overrides, version, is_mixture=is_mixture, plan=spec.plan
    )
    profile_of_release(arguments, version, request.weights)
    return arguments


def _has_block_experts_on_blackwell(request: BuildRequest) -> bool:
    has_experts = request.checkpoint.architecture.moe is not None
    return request.weights == "fp8_block" and has_experts and _is_blackwell(request.spec.gpu)


def _is_blackwell(gpu: str | None) -> bool:
    return gpu is not None and find_gpu(gpu).sm >= 100


def lora_fields(adapters: list[AdapterCheckpoint], family: str) -> dict[str, Any]:
    """Return the fields that reserve room for all adapters at once, on the GPUs and in host memory."""
    modules = {module: None for adapter in adapters for module in adapter.modules}
    config: dict[str, Any] = {
        "lora_target_modules": list(modules),
        "max_lora_rank": max(adapter.rank for adapter in adapters),
        "max_loras": len(adapters),
        "max_cpu_loras": len(adapters),
    }
    if family == "phi3":
        config |= _packed_modules(modules)
    return {"enable_lora": True, "lora_config": config}


def _packed_modules(modules: Iterable[str]) -> dict[str, Any]:
    """Return the LoRA fields of the LLM API for Phi-3, whose matrices are packed.

    The PyTorch backend skips modules that its mapping lacks, with a warning, and swaps gate and up
    of an adapter by default. The fields are the same as for Phi4MM, which is Phi-3 with encoders
    (NVIDIA/TensorRT-LLM `tensorrt_llm/_torch/models/modeling_phi4mm.py`, lora_config;
    `tensorrt_llm/lora_manager.py`, load_from_hf).
    """
    names = {"mlp_h_to_4h": ("mlp_gate_up", "gate_up_proj"), "attn_qkv": ("attn_qkv", "qkv_proj"),
             "attn_dense": ("attn_dense", "o_proj"), "mlp_4h_to_h": ("mlp_4h_to_h", "down_proj")}  # fmt: skip
    packed = dict(names.get(module, (module, "")) for module in modules)
    return {
        "lora_target_modules": list(packed),
        "trtllm_modules_to_hf_modules": {module: name for module, name in packed.items() if name},
        "swap_gate_up_proj_lora_b_weight": False,
    }


def _value(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text


target = PytorchTarget()
