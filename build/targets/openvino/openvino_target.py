"""Target openvino: check the specification and write `model/` (IR, detokenizer for grammars)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from llmops.build.checkpoint import Checkpoint
from llmops.build.engine_folder.manifest import EngineLimits, Golden, Quantisation
from llmops.build.engine_folder.manifest_extras import OpenVinoExtra, OpenVinoProperty, OpenVinoRuntime
from llmops.build.environment import installed_version
from llmops.build.model.families import FAMILIES
from llmops.build.progress import Progress
from llmops.build.quant_formats import buildable_formats
from llmops.build.spec import BuildSpec, setting_flag
from llmops.build.target_facts import TARGETS, TargetName
from llmops.build.targets.build_target import BuildResult, BuildTarget, GeneratorJob
from llmops.build.targets.openvino.rope import ROPE_KINDS, rope_kind
from llmops.distribution import missing_extra
from llmops.errors import CheckpointError, InputError

MODEL_FILE = "openvino_model.xml"
NATIVE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_DEFAULT_BATCH = 64
#: Bytes of the IR besides the weights: an upper bound.
_GRAPH_BYTES = 16 << 20
#: Bytes per weight of a matrix with its scales, by format.
_BYTES = {"int8": 1.0, "int4": 0.63}


class OpenVinoTarget(BuildTarget[Checkpoint]):
    """The target openvino.

    `--quant none` keeps the checkpoint's numbers exactly. int8 has scales per channel, and int4 per
    group of inputs.
    """

    name: TargetName = "openvino"

    def prepare(self, spec: BuildSpec, checkpoint: Checkpoint) -> OpenVinoJob:
        _check_flags(spec)
        _check_model(spec, checkpoint)
        _check_installed(checkpoint)
        return OpenVinoJob(spec, checkpoint, _group_size(spec, checkpoint))


class OpenVinoJob(GeneratorJob):
    """A build for OpenVINO. `group_size` is the group size of int4, or None for other formats."""

    def __init__(self, spec: BuildSpec, checkpoint: Checkpoint, group_size: int | None) -> None:
        super().__init__(spec, checkpoint)
        self.group_size = group_size

    @property
    def versions(self) -> dict[str, str]:
        return {name: installed_version(name) for name in ("openvino", "openvino-genai", "openvino-tokenizers", "gguf")}

    @property
    def disk_bytes(self) -> int:
        checkpoint, quant = self.checkpoint, self.spec.quant
        if quant in _BYTES:
            return int(checkpoint.parameters * _BYTES[quant]) + _GRAPH_BYTES
        wide = checkpoint.format == "gguf" and checkpoint.quantisation is not None
        return (checkpoint.parameters * 4 if wide else checkpoint.weight_bytes) + _GRAPH_BYTES

    def build(self, workdir: Path, progress: Progress) -> BuildResult:
        spec, checkpoint = self.spec, self.checkpoint
        model_dir = workdir / "model"
        model_dir.mkdir()
        _writer(checkpoint)(checkpoint, spec.quant, self.group_size, model_dir, progress)
        with progress.stage("Writing the vocabulary"):
            _write_for_genai(checkpoint, workdir / "tokenizer", model_dir)
        return BuildResult(
            golden=_golden(checkpoint, workdir / "tokenizer", progress),
            limits=_limits(spec, checkpoint),
            quantisation=Quantisation(weights=spec.quant, kv_cache=spec.kv_cache, group_size=self.group_size),
            extra=OpenVinoExtra(openvino=_runtime(spec, checkpoint)),
        )


def _golden(checkpoint: Checkpoint, tokenizer_dir: Path, progress: Progress) -> Golden | None:
    if _is_native(checkpoint):
        from llmops.build.targets.openvino.native_golden_answers import golden_answers

        return golden_answers(checkpoint, tokenizer_dir, progress)
    from llmops.build.quality.reference_answers import golden_of_checkpoint

    return golden_of_checkpoint(checkpoint, tokenizer_dir, progress)


def _write_for_genai(checkpoint: Checkpoint, tokenizer_dir: Path, model_dir: Path) -> None:
    """Write the files that GenAI reads beside the graph.

    The files have the vocabulary for grammars, and the token ids that end a generation.
    """
    from llmops.build.targets.openvino.detokenizer import write_detokenizer

    special = checkpoint.special_tokens
    write_detokenizer(tokenizer_dir / "tokenizer.json", checkpoint.architecture.vocab_size, model_dir)
    ids = {"bos_token_id": special.bos, "eos_token_id": list(special.end), "pad_token_id": special.pad}
    known = {name: value for name, value in ids.items() if value not in (None, [])}
    (model_dir / "generation_config.json").write_text(json.dumps(known, indent=2) + "\n")


def _check_flags(spec: BuildSpec) -> None:
    quants, caches = buildable_formats("openvino"), TARGETS["openvino"].kv_caches
    if spec.quant not in quants:
        raise InputError(f"--quant {spec.quant} is not for --target openvino; use one of {', '.join(quants)}.")
    if spec.kv_cache not in caches:
        raise InputError(f"--kv-cache {spec.kv_cache} is not for --target openvino; use one of {', '.join(caches)}.")
    if spec.tp * spec.pp * spec.ep != 1:
        raise InputError("--target openvino runs on one CPU; leave out --tp, --pp and --ep.")
    if spec.group_size is not None and spec.quant != "int4":
        raise InputError("--group-size needs --quant int4; leave it out, or add --quant int4.")
    if spec.deterministic and spec.kv_cache not in ("auto", "f32"):
        raise InputError(f"--deterministic needs a float32 KV cache; leave out --kv-cache {spec.kv_cache}.")
    if spec.options:
        raise InputError(f"--target openvino has no {setting_flag(next(iter(spec.options)))}; leave it out.")


def _check_model(spec: BuildSpec, checkpoint: Checkpoint) -> None:
    architecture = checkpoint.architecture
    if "openvino" not in architecture.targets:
        raise CheckpointError(
            f"Architecture {architecture.hf_class} is not supported by --target openvino; supported are "
            f"{', '.join(_supported())}."
        )
    if kept := checkpoint.kept_quantisation:
        raise CheckpointError(
            f"{checkpoint.ref} is already quantised ({kept.method}); give the full-precision "
            "checkpoint, from which --target openvino builds."
        )
    limit, window = architecture.max_position_embeddings, architecture.sliding_window
    if window is not None and (spec.max_seq_len or limit) > window.size:
        raise InputError(
            f"{checkpoint.ref} attends only to the last {window.size} tokens, which --target openvino does not "
            f"support. Shorter sequences are not affected: add --max-seq-len {window.size}."
        )
    if spec.max_seq_len is not None and spec.max_seq_len > limit:
        raise InputError(f"--max-seq-len {spec.max_seq_len} is over the model's context; use at most {limit}.")


def _supported() -> list[str]:
    families = [family for family in FAMILIES.values() if "openvino" in family.targets]
    return [name for family in families for name in family.hf_classes]


def _is_native(checkpoint: Checkpoint) -> bool:
    """Return True if decoder_graph.py covers the model.

    optimum-intel exports other families and RoPE scalings.
    """
    config = checkpoint.config
    plain = config.get("hidden_act", "silu") == "silu" and rope_kind(config) in ROPE_KINDS
    return checkpoint.architecture.family in NATIVE_FAMILIES and plain


def _writer(checkpoint: Checkpoint) -> Callable[[Checkpoint, str, int | None, Path, Progress], None]:
    if _is_native(checkpoint):
        from llmops.build.targets.openvino import native_export

        return native_export.write_model
    from llmops.build.targets.openvino import optimum_export

    return optimum_export.write_model


def _graph_origin(checkpoint: Checkpoint) -> str:
    if _is_native(checkpoint):
        return "llmops"
    return ", ".join(f"{name} {installed_version(name)}" for name in ("optimum-intel", "transformers", "torch", "nncf"))


def _check_installed(checkpoint: Checkpoint) -> None:
    if not _is_native(checkpoint):
        from llmops.build.targets.openvino.optimum_export import check_optimum_installed

        check_optimum_installed(checkpoint)
    for name in ("openvino", "openvino-tokenizers"):
        if not installed_version(name):
            raise missing_extra(f"--target openvino needs {name}, which is not installed", "embedded")


def _group_size(spec: BuildSpec, checkpoint: Checkpoint) -> int | None:
    """Return the group size of int4, or None for other formats.

    GGUF blocks have 32 elements, and groups of this size lose least. For other checkpoints, the
    default is the first of 128 (OpenVINO's default), 64 and 32 that divides all layers.
    """
    if spec.quant != "int4":
        return None
    architecture = checkpoint.architecture
    inputs = {architecture.hidden_size, architecture.intermediate_size, architecture.num_heads * architecture.head_dim}
    if spec.group_size is not None:
        bad = next((size for size in inputs if size % spec.group_size), None)
        if bad is not None:
            raise InputError(f"--group-size {spec.group_size} does not divide the layer size {bad}; use 32 or 64.")
        return spec.group_size
    sizes = (32,) if checkpoint.format == "gguf" else (128, 64, 32)
    return next((size for size in sizes if not any(n % size for n in inputs)), 32)


def _limits(spec: BuildSpec, checkpoint: Checkpoint) -> EngineLimits:
    batch = spec.max_batch_size or _DEFAULT_BATCH
    length = spec.max_seq_len or checkpoint.architecture.max_position_embeddings
    return EngineLimits(max_batch_size=batch, max_seq_len=length, max_num_tokens=spec.max_num_tokens or max(256, batch))


def _runtime(spec: BuildSpec, checkpoint: Checkpoint) -> OpenVinoRuntime:
    """Return the runtime settings of the engine, with the properties of OpenVINO's pipeline.

    An exact engine needs properties too: OpenVINO's defaults on a CPU are bfloat16 arithmetic, if
    the CPU supports it, and an 8-bit KV cache.
    """
    exact = spec.quant == "none" or spec.deterministic
    kv_cache = {"auto": "f32" if exact else "u8"}.get(spec.kv_cache, spec.kv_cache)
    properties: dict[OpenVinoProperty, str] = {"KV_CACHE_PRECISION": kv_cache}
    # A float32 KV cache needs float32 arithmetic: with bfloat16, the default on CPUs that support
    # it, OpenVINO fails.
    if exact or kv_cache == "f32":
        properties["INFERENCE_PRECISION_HINT"] = "f32"
    if spec.deterministic:
        # Rounding to 8-bit activations depends on the size of the batch (docs/decisions/0007).
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0"
    shape = checkpoint.architecture
    cache = {"layers": shape.num_layers, "kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    runtime = OpenVinoRuntime(device="CPU", properties=properties, kv_cache=cache, graph=_graph_origin(checkpoint))
    # With --max-num-tokens, each chunk has this size, so no duration of a step is wanted. Otherwise,
    # the engine chooses at start the size of chunk whose steps take `step_seconds`.
    return runtime if spec.max_num_tokens is None else runtime.model_copy(update={"step_seconds": None})
