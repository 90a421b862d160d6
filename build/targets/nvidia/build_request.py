"""The checked request of a build for NVIDIA targets.

This module rejects every request that cannot work on any machine.
"""

from dataclasses import dataclass
from typing import Any

from llmops.build.checkpoint import Checkpoint
from llmops.build.engine_folder.manifest import EngineLimits, Parallelism, Quantisation
from llmops.build.model.architecture import Architecture, stored_dtype
from llmops.build.model.families import FAMILIES
from llmops.build.quality.quality_gates import GATES, QualityGates
from llmops.build.quant_formats import PER_CHANNEL, QuantFormat, buildable_formats, check_kv_cache, format_of
from llmops.build.quantize.calibration import BUNDLED, CalibrationSettings, check_data
from llmops.build.quantize.sharding import check_sharding, choose_group_size
from llmops.build.spec import BuildSpec
from llmops.build.targets.nvidia.prequantized import is_prequantized, stored_kv_cache
from llmops.build.targets.nvidia.rotary_checks import check_rotary
from llmops.build.trtllm.container_images import DEFAULT_TAG, OWN_TAG, TrtllmImage
from llmops.build.trtllm.image_selection import image_for, image_of, release_of
from llmops.build.trtllm.unsupported_checkpoints import unsupported_reason
from llmops.errors import CheckpointError, InputError, VersionMismatchError

#: Default of --max-batch-size, in sequences.
_DEFAULT_BATCH = 256
#: Default of --max-num-tokens: the tokens of one engine step, as in TensorRT-LLM.
_DEFAULT_TOKENS = 8192
#: Default of --max-seq-len, in tokens, unless the model's context is shorter.
_DEFAULT_LENGTH = 8192
#: The first release line whose PyTorch backend applies the sliding window of a family, or None if
#: no known release does. NVIDIA/TensorRT-LLM #12597 added the window of Mistral and Mixtral. The
#: classes of other families pass no window to their base class
#: (`tensorrt_llm/_torch/models/modeling_{phi3,qwen,qwen3,qwen3_moe}.py`).
_WINDOW_SINCE = {"mistral": (1, 3), "mixtral": (1, 3), "phi3": None, "qwen2": None, "qwen3": None, "qwen3_moe": None}
#: Families that trtllm-build can build in fp8_pc_pt. The layers of this format
#: (`tensorrt_llm/quantization/layers.py`, Fp8RowwiseAttention, Fp8RowwiseRmsNorm) lack M-RoPE,
#: which Qwen's class passes to attention, and their norms return a pair, which Gemma's class adds
#: to a tensor.
_ROWWISE_ENGINES = frozenset({"llama", "mistral", "phi3"})
#: Formats whose scales the PyTorch backend splits by rows of a matrix.
_SCALES_BY_ROW = frozenset({"fp8_pc_pt", "int4_awq", "w4a8_awq", "int8_wo"})
_ATTENTION_DP = "llm.enable_attention_dp"
COMMON_OPTIONS = frozenset({*GATES, "calib_batch_size", "calib_seed", "quality", "image", "tensorrt_llm", "dtype"})


@dataclass(frozen=True)
class BuildRequest:
    """A checked request of a build for an NVIDIA target.

    `dtype` is the dtype of unquantised weights. `is_prequantized` is True if the checkpoint is
    already quantised, and is exported unchanged. `exports_unchanged` is True if the checkpoint is
    exported unchanged for this or another reason.
    """

    spec: BuildSpec
    checkpoint: Checkpoint
    quant_format: QuantFormat
    group_size: int | None
    kv_cache: str
    calibration: CalibrationSettings
    gates: QualityGates
    limits: EngineLimits
    dtype: str
    image: TrtllmImage
    is_prequantized: bool
    exports_unchanged: bool
    measure_quality: bool

    @property
    def stored_cache(self) -> str:
        """Return the KV cache dtype that the exported checkpoint names.

        For unquantised weights, target pytorch names no dtype: TensorRT-LLM refuses a checkpoint
        whose hf_quant_config.json has no algorithm for the weights
        (`tensorrt_llm/llmapi/llm_utils.py`, "Pre-quantized checkpoint must have quant_algo"). In
        this case, `kv_cache_config.dtype` sets the dtype of the cache.
        """
        return _stored_cache(self.spec)

    @property
    def calibrates(self) -> bool:
        """Return True if the build runs calibration texts through the model."""
        return self.quant_format.calibrated or self.stored_cache != "auto"

    @property
    def weights(self) -> str:
        """Return the name of the engine's weight format.

        If llmops has no name for the format, the result is the checkpoint's method.
        """
        found = self.checkpoint.quantisation
        if not self.is_prequantized or found is None:
            return self.quant_format.name
        return found.format.name if found.format else found.method

    @property
    def quantisation(self) -> Quantisation:
        """Return the number formats of the engine, for engine.json."""
        return Quantisation(weights=self.weights, kv_cache=self.kv_cache, group_size=self.group_size)

    @property
    def parallelism(self) -> Parallelism:
        """Return the parallel sizes of the engine, for engine.json."""
        return Parallelism(tp_size=self.spec.tp, pp_size=self.spec.pp, ep_size=self.spec.ep)


def make_request(spec: BuildSpec, checkpoint: Checkpoint) -> BuildRequest:
    """Check a specification against a checkpoint.

    Raises:
        InputError, CheckpointError, VersionMismatchError: The build is not possible.
    """
    arch = checkpoint.architecture
    if spec.target not in arch.targets:
        raise CheckpointError(_wrong_target(arch, spec.target))
    if spec.deterministic:
        raise InputError(
            "--deterministic is for --target openvino: TensorRT-LLM's kernels depend on the size of the batch, and "
            f"greedy answers of --target {spec.target} can too; leave it out."
        )
    quant_format = format_of(spec.quant, spec.target)
    check_kv_cache(spec.kv_cache, spec.target)
    image = _image(spec, FAMILIES[arch.family].since)
    if spec.target == "pytorch" and release_of(image.tensorrt_llm) < FAMILIES[arch.family].since:
        raise CheckpointError(
            f"TensorRT-LLM {image.tensorrt_llm} does not have {arch.hf_class}; use --set image={OWN_TAG}, which has it."
        )
    limits = _limits(spec, arch)
    _check_window(arch, spec.target, limits.max_seq_len, release_of(image.tensorrt_llm))
    unchanged = is_prequantized(spec, checkpoint, release_of(image.tensorrt_llm))
    _check_family_format(arch, quant_format, spec, unchanged)
    if spec.target == "tensorrt":
        check_rotary(checkpoint.config, arch.family, quant_format.name, release_of(image.tensorrt_llm))
    exports_unchanged = unchanged or _exports_unchanged(spec, checkpoint)
    group_size = _group_size(arch, quant_format, spec)
    check_sharding(arch, spec.tp, spec.pp, group_size, _rounds_widths(quant_format, spec))
    found = checkpoint.quantisation.format if unchanged and checkpoint.quantisation else None
    _check_shared_heads(arch, quant_format, spec, (found or quant_format).name)
    if spec.target == "tensorrt" and arch.moe is not None and arch.has_dense_layers:
        # In 1.2.1 `tensorrt_llm/models/qwen/model.py`, QWenDecoderLayer is MOE in every layer or in
        # none.
        raise CheckpointError(
            "This model has layers without experts, and TensorRT-LLM's engines have experts in every layer; use "
            "--target pytorch."
        )
    if spec.target == "tensorrt" and spec.pp > 1 and arch.family == "phi3":
        # In 1.2.1 `tensorrt_llm/models/phi3/model.py`, Phi3Model has embedding and last norm on
        # every rank, and takes no states from an earlier rank.
        raise InputError(
            "--pp is not possible: TensorRT-LLM's engines of Phi-3 and Phi-4 have no pipeline stages; use --tp."
        )
    return BuildRequest(
        spec=spec,
        checkpoint=checkpoint,
        quant_format=quant_format,
        group_size=group_size,
        kv_cache=_kv_cache(spec, checkpoint, unchanged),
        calibration=_calibration(spec, quant_format),
        gates=QualityGates.from_options(spec.options, quant_format.name, _stored_cache(spec)),
        limits=limits,
        dtype=stored_dtype(arch, spec.options.get("dtype")),
        image=image,
        is_prequantized=unchanged,
        exports_unchanged=exports_unchanged,
        measure_quality=not exports_unchanged and boolean_option(spec, "quality", True),
    )


def _wrong_target(arch: Architecture, target: str) -> str:
    others = ", ".join(sorted(arch.targets))
    return f"--target {target} cannot serve {arch.hf_class}; use --target {others}."


def _exports_unchanged(spec: BuildSpec, checkpoint: Checkpoint) -> bool:
    """Return True if the target exports the checkpoint unchanged.

    Target pytorch exports a Hugging Face folder unchanged if --quant is none.
    """
    return spec.quant == "none" and spec.target == "pytorch" and checkpoint.format == "huggingface"


def _kv_cache(spec: BuildSpec, checkpoint: Checkpoint, is_prequantized: bool) -> str:
    """Return the dtype of the KV cache that the engine will have."""
    stored = stored_kv_cache(checkpoint.quantisation) if is_prequantized and spec.kv_cache == "auto" else None
    return stored or spec.kv_cache


def _stored_cache(spec: BuildSpec) -> str:
    return "auto" if spec.target == "pytorch" and spec.quant == "none" else spec.kv_cache


def _check_family_format(arch: Architecture, quant_format: QuantFormat, spec: BuildSpec, is_prequantized: bool) -> None:
    if is_prequantized:
        return
    allowed = allowed_formats(arch.family, spec.target)
    if quant_format.name not in allowed:
        found = unsupported_reason(arch.family, quant_format.algorithm) if spec.target == "pytorch" else None
        because = f" (TensorRT-LLM does not load it: {found.reason})" if found else ""
        raise InputError(
            f"--quant {quant_format.name} is not for {arch.hf_class} on --target {spec.target}{because}; use "
            f"{', '.join(allowed)}."
        )


def allowed_formats(family: str, target: str) -> tuple[str, ...]:
    """Return the formats in which a family can be built for a target.

    docs/tensorrt-llm.md lists the formats under "What loads".
    """
    if FAMILIES[family].as_published:
        return ("none",)
    if target == "tensorrt" and family in ("qwen3", "qwen3_moe"):
        # Source: the support matrix of NVIDIA/TensorRT-LLM examples/models/core/qwen/README.md.
        return ("none", "fp8")
    formats = list(buildable_formats(target).items())
    if FAMILIES[family].moe is not None:
        formats = [(name, quant_format) for name, quant_format in formats if target in quant_format.mixtures]
    if target == "pytorch":
        return tuple(
            name for name, quant_format in formats if unsupported_reason(family, quant_format.algorithm) is None
        )
    return tuple(name for name, _ in formats if name != "fp8_pc_pt" or family in _ROWWISE_ENGINES)


def _group_size(arch: Architecture, quant_format: QuantFormat, spec: BuildSpec) -> int | None:
    if quant_format.grouped:
        return choose_group_size(
            arch, spec.tp, spec.group_size, quant_format.groups, _rounds_widths(quant_format, spec)
        )
    if spec.group_size is not None:
        grouped = (name for name, other in buildable_formats(spec.target).items() if other.grouped)
        raise InputError(
            f"--group-size goes with {' and '.join(grouped)}, not with --quant {quant_format.name}; leave it out."
        )
    return None


def _check_shared_heads(arch: Architecture, quant_format: QuantFormat, spec: BuildSpec, weights: str) -> None:
    """Raise InputError for KV heads that several GPUs share, if their scales are not copied.

    ModelOpt 0.47 fails after quantisation (`export/layer_utils.py`, "Duplicating KV heads
    per-channel scales is not supported"). The PyTorch backend fails when it loads: its mapper
    copies only weights and biases (`tensorrt_llm/_torch/models/checkpoints/hf/weight_mapper.py`,
    _duplicate_kv_weights), and the mapper of Qwen's MoE models also the scales of blocks.
    """
    if spec.tp <= arch.num_kv_heads or arch.mla is not None or str(spec.options.get(_ATTENTION_DP)).lower() == "true":
        return
    if spec.target == "tensorrt":
        copied = quant_format.preset is None or quant_format.group != PER_CHANNEL
    else:
        by_row = weights in _SCALES_BY_ROW or (weights == "fp8_block" and arch.family != "qwen3_moe")
        copied = FAMILIES[arch.family].as_published or not by_row
    if not copied:
        raise InputError(
            f"--tp {spec.tp} puts each of {arch.num_kv_heads} KV heads on several GPUs, which "
            f"{'ModelOpt' if spec.target == 'tensorrt' else 'TensorRT-LLM'} does not support in {weights}; use --tp "
            f"{arch.num_kv_heads} or less, or {'a checkpoint in' if weights == 'fp8_block' else '--quant'} fp8."
        )


def _rounds_widths(quant_format: QuantFormat, spec: BuildSpec) -> bool:
    """Return True if an engine's layers of the format round their widths (quantize/sharding.py)."""
    return spec.target == "tensorrt" and (quant_format.grouped or quant_format.quantized_by_builder)


def _calibration(spec: BuildSpec, quant_format: QuantFormat) -> CalibrationSettings:
    defaults = CalibrationSettings()
    if spec.calib_dataset is not None and not quant_format.calibrated and _stored_cache(spec) == "auto":
        raise InputError(
            f"--calib-data has no effect, because --quant {quant_format.name} needs no calibration; leave it out."
        )
    return CalibrationSettings(
        dataset=spec.calib_dataset or BUNDLED,
        size=spec.calib_size,
        seq_len=spec.calib_seq_len or defaults.seq_len,
        batch_size=positive_option(spec, "calib_batch_size", 1) if "calib_batch_size" in spec.options else None,
        seed=positive_option(spec, "calib_seed", defaults.seed),
    )


def check_calibration(request: BuildRequest) -> None:
    """Check the calibration data before weights are loaded, because loading takes minutes."""
    if request.calibrates:
        check_data(request.calibration)


def _limits(spec: BuildSpec, arch: Architecture) -> EngineLimits:
    context = arch.max_position_embeddings
    if spec.max_seq_len is not None and spec.max_seq_len > context:
        raise InputError(f"--max-seq-len {spec.max_seq_len} is over the model's context; use at most {context}.")
    batch = spec.max_batch_size or _DEFAULT_BATCH
    tokens = spec.max_num_tokens or max(_DEFAULT_TOKENS, batch)
    if tokens < batch:
        raise InputError(
            f"--max-num-tokens {tokens} is smaller than the batch of {batch}; raise it, or lower --max-batch-size."
        )
    return EngineLimits(
        max_batch_size=batch, max_seq_len=spec.max_seq_len or min(context, _DEFAULT_LENGTH), max_num_tokens=tokens
    )


def _check_window(arch: Architecture, target: str, length: int, minor: tuple[int, int]) -> None:
    """Raise InputError for a sliding window that TensorRT-LLM's class of the model ignores.

    A window of at least `length` tokens, the maximum sequence length, may be ignored. `minor` is
    the release line of TensorRT-LLM.
    """
    window = arch.sliding_window
    since = _WINDOW_SINCE.get(arch.family, minor)
    if target == "pytorch" and (since is None or minor < since) and window and length > window.size:
        raise InputError(
            f"This model attends only to the last {window.size} tokens, which TensorRT-LLM's PyTorch backend does "
            f"not support. Shorter sequences are not affected: add --max-seq-len {window.size}, or use --target "
            "tensorrt."
        )


def _image(spec: BuildSpec, since: tuple[int, int]) -> TrtllmImage:
    """Return the image of the options, or else an image whose release has the model's family.

    `since` is the first release line of TensorRT-LLM with the family.
    """
    version = spec.options.get("tensorrt_llm")
    tag = spec.options.get("image")
    if tag is None and version:
        return _image_of_version(spec.target, str(version))
    if tag is None:
        default = image_of(DEFAULT_TAG)
        return default if since <= release_of(default.tensorrt_llm) else image_of(OWN_TAG)
    image = image_of(str(tag))
    if spec.target not in image.targets or (version and image.tensorrt_llm != version):
        right = image_for(spec.target, str(version or "1.2.1"))
        raise VersionMismatchError(
            f"Image {image.tag} has TensorRT-LLM {image.tensorrt_llm}, which cannot run this build (target "
            f"{spec.target}); use --set image={right.tag}."
        )
    return image


def _image_of_version(target: str, version: str) -> TrtllmImage:
    """Return the image of this version, or of a later version in the same minor release."""
    image = image_for(target, version)
    if release_of(image.tensorrt_llm) != release_of(version):
        raise VersionMismatchError(
            f"--target {target} needs TensorRT-LLM {image.tensorrt_llm}, not {version}; leave the version out, or "
            "use --target tensorrt, which has engines for that version."
        )
    return image


def positive_option(spec: BuildSpec, name: str, default: int) -> int:
    """Return the option `name`, or `default`, as a whole number.

    Raises:
        InputError: The value is not a whole number of at least 1.
    """
    value = spec.options.get(name, default)
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        flag = f"--{name.replace('_', '-')} " if name.startswith("calib_") else f"--set {name}="
        raise InputError(f"{flag}{value} is not possible; give a whole number of at least 1.")
    return number


def boolean_option(spec: BuildSpec, name: str, default: bool) -> bool:
    """Return the option `name`, or `default`, as True or False.

    Raises:
        InputError: The value is neither true nor false.
    """
    value = str(spec.options.get(name, default)).lower()
    if value not in ("true", "false"):
        raise InputError(f"--set {name}={value} is not possible; give true or false.")
    return value == "true"


def unknown_options(spec: BuildSpec, known: frozenset[str], prefixes: tuple[str, ...]) -> None:
    """Raise InputError for an option not in `known` that starts with none of `prefixes`."""
    import difflib

    for name in spec.options:
        if name not in known and not name.startswith(prefixes):
            near: list[Any] = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}" if near else f"choose one of {', '.join(sorted(known))}"
            raise InputError(f"--target {spec.target} has no setting --set {name}; {hint}.")
