"""Export a quantised model.

The result is a TensorRT-LLM checkpoint with one rank file per GPU, or a Hugging Face checkpoint.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmops.build.model.architecture import Architecture, stored_dtype
from llmops.build.quant_formats import QuantFormat
from llmops.build.quantize.hf_config import rewrite_config
from llmops.build.quantize.model_loading import silence_libraries
from llmops.build.quantize.module_fixes import interleave_gate_up
from llmops.build.quantize.trtllm_config import DECODER_TYPES, trtllm_checkpoint_config
from llmops.errors import BuildError

_SCALES = ("weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale")


def export_engine_checkpoint(
    model: Any, arch: Architecture, quant_format: QuantFormat, folder: Path, tp: int, pp: int, dtype: str | None = None
) -> dict[str, Any]:
    """Write config.json and one rank file per GPU, and return the config.

    `dtype` (float16 or bfloat16) is the dtype of unquantised weights, or None for the dtype of the
    source.

    Raises:
        BuildError: ModelOpt cannot export the model.
    """
    import torch
    from modelopt.torch.export import export_tensorrt_llm_checkpoint

    dtype = dtype or stored_dtype(arch)
    if arch.family == "phi3":
        interleave_gate_up(model, tp)
    try:
        with silence_libraries(), torch.inference_mode(), _own_config(arch, dtype), _experts_unpadded():
            export_tensorrt_llm_checkpoint(
                model,
                DECODER_TYPES[arch.family],
                getattr(torch, dtype),
                folder,
                inference_tensor_parallel=tp,
                inference_pipeline_parallel=pp,
            )
    except (NotImplementedError, AssertionError, ValueError, TypeError) as error:
        raise BuildError(
            f"ModelOpt could not export {arch.hf_class} for tp {tp}: {error}; use another --quant, or report this."
        ) from error
    if pp > 1:
        _add_output_matrix(folder, tp, pp)
    return _complete_quantization(folder / "config.json", quant_format)


def _add_output_matrix(folder: Path, tp: int, pp: int) -> None:
    """Copy Gemma's embedding to the last pipeline stage as its output matrix.

    ModelOpt writes the shared matrix only on the first stage, and the last stage needs the matrix
    too. Ranks split both copies along the vocabulary.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    for part in range(tp):
        first, last = folder / f"rank{part}.safetensors", folder / f"rank{(pp - 1) * tp + part}.safetensors"
        tensors = load_file(last)
        if "lm_head.weight" not in tensors:
            with safe_open(first, "pt") as file:
                tensors["lm_head.weight"] = file.get_tensor("transformer.vocab_embedding.weight")
            save_file(tensors, last)


def _complete_quantization(path: Path, quant_format: QuantFormat) -> dict[str, Any]:
    """Set the algorithm in config.json, and remove ModelOpt's list of excluded modules.

    The exporter takes the algorithm from its own quantisers, which do not exist if trtllm-build
    quantises. ModelOpt's list names only lm_head, and would replace TensorRT-LLM's default list,
    which also has routers and embeddings (`tensorrt_llm/quantization/quantize.py`,
    quantize_layers).
    """
    config: dict[str, Any] = json.loads(path.read_text())
    config["quantization"]["quant_algo"] = quant_format.algorithm
    config["quantization"].pop("exclude_modules", None)
    path.write_text(json.dumps(config, indent=4))
    return config


@contextlib.contextmanager
def _own_config(arch: Architecture, dtype: str) -> Iterator[None]:
    """Let ModelOpt's exporter write the config.json of `trtllm_checkpoint_config`.

    The docstring of trtllm_config.py names the faults of ModelOpt's own config.json.
    """
    import modelopt.torch.export.model_config_export as exporter

    def convert(model_config: Any, quant_config: dict[str, Any], hf_config: Any = None) -> dict[str, Any]:
        # Change the dict in place: if no layer is quantised, the exporter writes `quantization`
        # from this dict again.
        quant_config["kv_cache_quant_algo"] = next(
            (layer.attention.kv_cache_dtype for layer in model_config.layers if layer.attention), None
        )
        quantization = {key: value for key, value in quant_config.items() if key != "quantized_layers"}
        mapping = {"tp_size": model_config.tensor_parallel, "pp_size": model_config.pipeline_parallel}
        config = trtllm_checkpoint_config(arch, hf_config, dtype, model_config.vocab_size, mapping, quantization)
        config["share_embedding_table"] |= model_config.lm_head is None and model_config.pipeline_parallel == 1
        # The exporter itself reads the fields `rank` and `decoder`.
        return {**config, "rank": model_config.rank, "decoder": DECODER_TYPES[arch.family]}

    original = exporter.convert_to_tensorrt_llm_config
    exporter.convert_to_tensorrt_llm_config = convert
    try:
        yield
    finally:
        exporter.convert_to_tensorrt_llm_config = original


@contextlib.contextmanager
def _experts_unpadded() -> Iterator[None]:
    """Keep ModelOpt 0.47 from padding stacked experts.

    ModelOpt pads expert weights (experts, hidden, intermediate) by the number of experts instead of
    rows: with 4 experts and tp 8, every w2 got 4 extra hidden rows. Split dimensions are checked
    before, so no weight needs padding.
    """
    import modelopt.torch.export.postprocess as postprocess

    original = postprocess.pad_weights
    postprocess.pad_weights = lambda weights, tp: weights if weights.dim() == 3 else original(weights, tp)
    try:
        yield
    finally:
        postprocess.pad_weights = original


def export_hf_checkpoint(
    model: Any, arch: Architecture, quant_format: QuantFormat, folder: Path, dtype: str | None = None
) -> dict[str, Any]:
    """Write a Hugging Face checkpoint, and return the content of hf_quant_config.json.

    The content is {} if nothing is quantised.

    Raises:
        BuildError: ModelOpt cannot export the model.
    """
    import torch
    from modelopt.torch.export import export_hf_checkpoint as export

    dtype = dtype or stored_dtype(arch)
    try:
        with silence_libraries(), torch.inference_mode(), _experts_of_two_steps(quant_format), _any_sampling(model):
            export(model, getattr(torch, dtype), folder)
    except (NotImplementedError, AssertionError, ValueError, TypeError, AttributeError) as error:
        raise BuildError(
            f"ModelOpt could not export {arch.hf_class} as a Hugging Face checkpoint: {error}; use another --quant, "
            "or report this."
        ) from error
    for file in sorted(folder.glob("*.safetensors")):
        _cast_unquantised(file, getattr(torch, dtype))
    rewrite_config(folder, dtype)
    model.generation_config.to_json_file(folder / "generation_config.json")
    path = folder / "hf_quant_config.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}


@contextlib.contextmanager
def _any_sampling(model: Any) -> Iterator[None]:
    """Let transformers 5 save a model whose generation_config.json contradicts itself.

    Published files have a temperature without `do_sample`, for example. transformers loads such a
    file, and raises ValueError when a model is saved with it.
    """
    own, model.generation_config = model.generation_config, type(model.generation_config)()
    try:
        yield
    finally:
        model.generation_config = own


@contextlib.contextmanager
def _experts_of_two_steps(quant_format: QuantFormat) -> Iterator[None]:
    """Let ModelOpt 0.47 export experts in W4A8.

    Weights in W4A8 are rounded in two steps (INT4 groups, then FP8). Before writing, ModelOpt gives
    gate and up of an expert a common largest value, which raises an error for the groups of the
    first step. W4A8 needs no common value: TensorRT-LLM takes the larger of the two scales when it
    fuses gate and up (`tensorrt_llm/_torch/modules/fused_moe/quantization.py`,
    WInt4AFP8FusedMoEMethod.load_quant_scales).
    """
    import modelopt.torch.export.unified_export_hf as exporter

    original = exporter.sync_moe_gate_up_amax
    if quant_format.algorithm == "W4A8_AWQ":
        exporter.sync_moe_gate_up_amax = lambda model: 0
    try:
        yield
    finally:
        exporter.sync_moe_gate_up_amax = original


def _cast_unquantised(file: Path, dtype: Any) -> None:
    """Cast norms and embeddings of a model calibrated in float32.

    Scales stay float32, as TensorRT-LLM requires.
    """
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    casts = {k: v.to(dtype) for k, v in tensors.items() if v.dtype == torch.float32 and not k.endswith(_SCALES)}
    if casts:
        save_file({**tensors, **casts}, file, metadata={"format": "pt"})
