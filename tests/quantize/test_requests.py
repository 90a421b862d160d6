"""Builds that cannot work are rejected before any work, with what would work."""

import copy
import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import pytest

from llmops.build.checkpoint import ExistingQuantisation, open_checkpoint
from llmops.build.checkpoint.hashing import sha256_of
from llmops.build.plan.timing.silicon import package_root
from llmops.build.progress import SilentProgress
from llmops.build.quant_formats import FORMATS, buildable_formats
from llmops.build.quantize.calibration import (
    CalibrationSettings,
    batches,
    bundled_texts,
    check_data,
    load_texts,
    pack_sequences,
)
from llmops.build.quantize.hf_config import with_transformers4_keys
from llmops.build.spec import BuildSpec
from llmops.build.target_facts import NAMES, TARGETS
from llmops.build.targets import pytorch, tensorrt
from llmops.build.targets.build_target import get_target
from llmops.build.targets.nvidia.build_request import make_request
from llmops.build.trtllm.release_profiles import profiles_per_release
from llmops.errors import CheckpointError, InputError, VersionMismatchError
from llmops.model_repository.targets import find_target
from tests.support.tiny_models import write_checkpoint


def spec(target="tensorrt", tmp_path="engine", **fields):
    return BuildSpec(checkpoint="c", output=tmp_path, target=target, **fields)


@pytest.mark.parametrize(
    ("family", "fields", "error", "says"),
    [
        ("llama", {"quant": "int8_sq", "target": "pytorch"}, InputError, "run on target pytorch; use one of none"),
        ("llama", {"quant": "fp4"}, InputError, "is unknown; use one of none, fp8"),
        ("llama", {"kv_cache": "int8", "target": "pytorch"}, InputError, "use one of auto, fp8"),
        ("llama", {"group_size": 64}, InputError, "goes with int4_awq"),
        ("mixtral", {"quant": "int8_sq"}, InputError, "not for MixtralForCausalLM on --target tensorrt"),
        ("qwen3", {"quant": "int4_awq"}, InputError, "use none, fp8"),
        # quantization/layers.py: Fp8RowwiseAttention.forward has no mrope_params, which models/qwen/model.py hands it,
        # and neither softcap nor norms of queries and keys; models/gemma/model.py adds norms to a tensor, and
        # Fp8RowwiseRmsNorm returns a pair
        *((family, {"quant": "fp8_pc_pt"}, InputError, "use none, fp8, int4_awq")
          for family in ("qwen2", "gemma2", "gemma3")),
        ("deepseek_v3", {}, CheckpointError, "cannot serve DeepseekV3ForCausalLM; use --target pytorch"),
        ("gpt_oss", {"target": "pytorch", "quant": "fp8"}, InputError, "use none"),
        ("llama", {"deterministic": True}, InputError, "--deterministic is for --target openvino"),
        ("llama", {"max_seq_len": 4096}, InputError, "over the model's context; use at most 512"),
        ("llama", {"max_batch_size": 64, "max_num_tokens": 32}, InputError, "smaller than the batch of 64"),
        ("llama", {"options": {"image": "26.02", "tensorrt_llm": "1.2.1"}}, VersionMismatchError, "--set image=26.07"),
        ("llama", {"options": {"image": "25.12"}, "target": "pytorch"}, VersionMismatchError, "TensorRT-LLM 1.1.0"),
        ("llama", {"options": {"calib_batch_size": "0"}}, InputError, "--calib-batch-size 0 is not possible"),
        ("llama", {"options": {"min_top1": "1.5"}}, InputError, "--min-top1 1.5 is out of range; give a number from 0"),
        ("llama", {"options": {"max_mean_kl": "-1"}}, InputError, "--max-mean-kl -1 is out of range; give a number"),
        ("llama", {"options": {"max_ppl_ratio": "inf"}}, InputError, "--max-ppl-ratio inf is out of range"),
        ("llama", {"options": {"tensorrt_llm": "1.1.0"}, "target": "pytorch"}, VersionMismatchError,
         "--target pytorch needs TensorRT-LLM 1.2.1, not 1.1.0"),
        ("llama", {"quant": "w4a8_awq", "group_size": 64}, InputError, "kernels for 128 only"),
        ("llama", {"options": {"dtype": "float32"}}, InputError, "choose float16 or bfloat16"),
        ("llama", {"quant": "int8_wo", "calib_dataset": "cnn_dailymail"}, InputError, "needs no calibration"),
        ("llama", {"target": "pytorch", "kv_cache": "fp8", "calib_dataset": "cnn_dailymail"}, InputError,
         "--quant none needs no calibration"),
        *(
            (family, {"target": "pytorch", "quant": "int4_awq"}, InputError,
             f"--quant int4_awq is not for {name}ForCausalLM on --target pytorch (TensorRT-LLM does not load it: its "
             "loader of 4-bit experts wants the input scales of FP8 activations); use none, fp8, w4a8_awq.")
            for family, name in (("mixtral", "Mixtral"), ("qwen3_moe", "Qwen3Moe"))
        ),
        *(
            ("phi3", {"target": "pytorch", "quant": quant}, InputError, "use none, fp8.")
            for quant in ("int4_awq", "w4a8_awq", "fp8_pc_pt", "int8_wo")
        ),
    ],
)  # fmt: skip
def test_refused(checkpoint, family, fields, error, says):
    import re

    with pytest.raises(error, match=re.escape(says)):
        make_request(spec(**fields), checkpoint(family))


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}


@pytest.mark.parametrize(
    ("family", "config", "fields", "says"),
    [
        # models/llama/model.py hands attention rope_gpt_neox and no factors per dimension
        ("llama", {"rope_scaling": LONGROPE}, {}, "engines have only for Phi-3 and Phi-4; use --target pytorch"),
        ("mistral", {"rope_parameters": LONGROPE}, {}, "has rope_type longrope"),
        # Fp8RowwiseAttention.forward hands the plugin no long_rope_rotary_inv_freq
        ("phi3", {"rope_scaling": {**LONGROPE, "rope_type": None, "type": "su"}}, {"quant": "fp8_pc_pt"},
         "rope_type su, which engines in fp8_pc_pt do not have"),
        # 1.1 layers/attention.py: register_rope_params takes the scaling of the model for both kinds of layers
        ("gemma3", LINEAR, {"options": {"image": "25.12"}}, "1.1 scales positions in this model's local layers, too"),
        ("gemma3", {"text_config": LINEAR}, {"options": {"image": "25.10"}}, "--set image=26.07"),
        ("gemma3", {"rope_parameters": {"full_attention": LINEAR["rope_scaling"]}}, {"options": {"image": "26.01"}},
         "local layers"),
    ],
)  # fmt: skip
def test_positions_that_an_engine_would_rotate_otherwise_are_refused(checkpoint, family, config, fields, says):
    source = checkpoint(family)
    source = dataclasses.replace(source, config={**source.config, "rope_parameters": None, **config})
    with pytest.raises(InputError, match=says):
        make_request(spec(**fields), source)


def test_positions_that_an_engine_rotates_as_the_model(checkpoint):
    for family, config, fields in (
        ("llama", {"rope_scaling": LONGROPE}, {"target": "pytorch"}),
        ("phi3", {"rope_scaling": LONGROPE}, {"quant": "fp8"}),
        ("llama", {"rope_parameters": {"rope_type": "default"}}, {"quant": "fp8_pc_pt"}),
        ("gemma3", LINEAR, {"options": {"image": "26.03"}}),
    ):
        source = checkpoint(family)
        make_request(spec(**fields), dataclasses.replace(source, config={**source.config, **config}))


def test_widths_that_an_engine_of_narrow_weights_rounds_up_are_refused(checkpoint):
    source = checkpoint("llama")
    for quant, tp in (("int8_wo", 2), ("int4_wo", 2), ("int4_awq", 2)):
        make_request(spec(quant=quant, tp=tp), source)
        with pytest.raises(InputError, match=r"--tp 8 .*features, which an engine of this format needs in multiples"):
            make_request(spec(quant=quant, tp=8), _divisible(source))
    make_request(spec(quant="fp8", tp=8), _divisible(source))
    make_request(spec("pytorch", quant="int8_wo", tp=8), _divisible(source))


@pytest.mark.parametrize("quant", ["int8_sq", "fp8_pc_pt"])
def test_kv_heads_on_several_gpus_have_no_scales_per_channel(checkpoint, quant):
    """ModelOpt 0.47 export/layer_utils.py: NotImplementedError, hours later."""
    source = checkpoint("llama")  # 4 KV heads
    make_request(spec(quant=quant, tp=4), source)
    with pytest.raises(InputError, match=r"each of 4 KV heads on several GPUs, .* use --tp 4 or less"):
        make_request(spec(quant=quant, tp=8), source)
    for other in (spec(quant="fp8", tp=8), spec(quant="int8_wo", tp=1), spec(quant="none", tp=8)):
        make_request(other, source)


@pytest.mark.parametrize("quant", ["int4_awq", "w4a8_awq", "fp8_pc_pt", "int8_wo"])
def test_the_pytorch_backend_copies_no_scales_of_kv_heads(checkpoint, quant):
    """_torch/models/checkpoints/hf/weight_mapper.py, _duplicate_kv_weights: `if k in ["weight", "bias"]`."""
    source = checkpoint("qwen2")  # 4 KV heads
    shape = dataclasses.replace(source.architecture, head_dim=256, intermediate_size=2048)
    source = dataclasses.replace(source, architecture=shape)
    make_request(spec("pytorch", quant=quant, tp=2), source)
    with pytest.raises(InputError, match=r"--tp 8 puts .* TensorRT-LLM does not support in .*; use --tp 4 or less"):
        make_request(spec("pytorch", quant=quant, tp=8), source)
    make_request(spec("pytorch", quant=quant, tp=8, options={"llm.enable_attention_dp": "true"}), source)
    for other in ("fp8", "none"):
        make_request(spec("pytorch", quant=other, tp=8), source)


def blocks(checkpoint, family, **shape):
    """A checkpoint of FP8 in blocks."""
    source = checkpoint(family)
    found = ExistingQuantisation("fp8", 8, {"weight_block_size": [128, 128]})
    changed = {"head_dim": 128, **shape, "num_heads": 16, "num_kv_heads": 8}
    if width := changed.pop("moe_intermediate_size", None):
        changed["moe"] = dataclasses.replace(source.architecture.moe, moe_intermediate_size=width, num_experts=128)
    shape = dataclasses.replace(source.architecture, **changed)
    return dataclasses.replace(source, quantisation=found, architecture=shape)


def test_fp8_blocks_are_not_cut(checkpoint, tmp_path):
    """_torch/modules/fused_moe/quantization.py: "intermediate_size_per_partition should be divisible by"."""

    def says(source, **fields):
        with pytest.raises(InputError) as caught:
            pytorch.target.prepare(spec("pytorch", tmp_path / "e", **fields), source)
        return str(caught.value)

    large = blocks(checkpoint, "qwen3_moe", moe_intermediate_size=1536)  # Qwen3-235B-A22B-FP8
    assert says(large, tp=8) == (
        "--tp 8 would split the MLP of 1536 into 8 parts of 192, which must be multiples of 128 with FP8 in blocks; "
        "add --ep 2."
    )
    for fields in ({"tp": 8, "ep": 8}, {"tp": 8, "ep": 2}, {"tp": 4}, {}):
        pytorch.target.prepare(spec("pytorch", tmp_path / "e", **fields), large)
    dense = blocks(checkpoint, "qwen3", intermediate_size=9728)  # Qwen3-4B-FP8
    assert says(dense, tp=8).endswith("8 parts of 1216, which must be multiples of 128 with FP8 in blocks; use --tp 4.")
    for tp in (1, 2, 4):
        pytorch.target.prepare(spec("pytorch", tmp_path / "e", tp=tp), dense)
    odd = blocks(checkpoint, "qwen3", intermediate_size=9728 + 64)
    assert says(odd, tp=2).endswith("use --tp 1.")
    pytorch.target.prepare(spec("pytorch", tmp_path / "e"), odd)
    apart = {"tp": 8, "options": {"llm.enable_attention_dp": "true"}}
    pytorch.target.prepare(spec("pytorch", tmp_path / "e", **apart), dense)
    # FP8BlockScalesLinearMethod.create_weights: a scale per 128 rows of the matrix of all three, 64 of them keys
    small = blocks(checkpoint, "llama", intermediate_size=8192, head_dim=64)  # Llama 3.2 1B
    assert says(small, tp=8) == (
        "--tp 8 would split the keys of 512 into 8 parts of 64, which must be multiples of 128 with FP8 in blocks; use "
        "fewer GPUs, or a checkpoint in fp8."
    )
    for fields in ({"tp": 4}, apart):
        pytorch.target.prepare(spec("pytorch", tmp_path / "e", **fields), small)


def test_modelopts_blocks_are_not_cut_either(checkpoint, tmp_path):
    """`llmapi/llm_utils.py` of 1.2.1: "fp8_pb_wo from modelopt is the same as fp8_block_scales"."""
    shape = blocks(checkpoint, "qwen3", intermediate_size=9728).architecture
    source = dataclasses.replace(modelopt(checkpoint("qwen3"), tmp_path, "fp8_pb_wo"), architecture=shape)
    given = spec("pytorch", tmp_path / "e", tp=8)
    with pytest.raises(InputError, match=r"8 parts of 1216, which must be multiples of 128 .*; use --tp 4\."):
        pytorch.target.prepare(given, source)
    made = pytorch.target.prepare(dataclasses.replace(given, tp=4), source)
    assert made.request.quantisation.weights == "fp8_block"
    with pytest.raises(InputError, match="a100-sxm has no FP8 arithmetic, which"):
        pytorch.target.prepare(dataclasses.replace(given, tp=1, gpu="a100-sxm"), source)


def test_an_engine_has_experts_in_all_layers_or_in_none(checkpoint):
    source = checkpoint("qwen3_moe")
    shape = dataclasses.replace(source.architecture.moe, layers=(1,))
    mixed = dataclasses.replace(source, architecture=dataclasses.replace(source.architecture, moe=shape))
    with pytest.raises(CheckpointError, match=r"layers without experts, .* use --target pytorch"):
        make_request(spec(), mixed)
    make_request(spec("pytorch"), mixed)


def _divisible(source):
    shape = dataclasses.replace(source.architecture, num_heads=8, num_kv_heads=8, head_dim=64, intermediate_size=1024)
    return dataclasses.replace(source, architecture=shape)


def quantised(checkpoint, method):
    return dataclasses.replace(checkpoint, quantisation=ExistingQuantisation(method, 8))


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "compressed-tensors", "bitsandbytes", "modelopt", "mxfp4"])
def test_engines_start_from_full_precision(checkpoint, method):
    with pytest.raises(CheckpointError, match=f"already quantised .{method}., which --target tensorrt cannot take"):
        make_request(spec(), quantised(checkpoint("llama"), method))


def test_pytorch_passes_on_what_its_loader_knows(checkpoint):
    assert make_request(spec("pytorch"), quantised(checkpoint("gpt_oss"), "mxfp4")).is_prequantized
    with pytest.raises(CheckpointError, match="for gpt_oss only"):
        make_request(spec("pytorch"), quantised(checkpoint("llama"), "mxfp4"))
    with pytest.raises(CheckpointError, match=r"bitsandbytes.*does not load; give the full-.* with --quant int4_awq"):
        make_request(spec("pytorch"), quantised(checkpoint("llama"), "bitsandbytes"))


def modelopt(checkpoint, folder, algorithm, **more):
    """A checkpoint that ModelOpt quantised, config.json and hf_quant_config.json alone."""
    (folder / "config.json").write_text((checkpoint.path / "config.json").read_text())
    described = {"quant_algo": algorithm, "group_size": 128, **more}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": described}))
    return open_checkpoint(str(folder), weights=False)


def test_int8_weights_that_are_passed_on_are_known_as_such(checkpoint, tmp_path):
    source, older = modelopt(checkpoint("llama"), tmp_path, "W8A16"), {"image": "26.07"}
    job = pytorch.target.prepare(spec("pytorch", tmp_path / "e", options=older), source)
    assert job.request.is_prequantized
    assert job.request.quantisation.weights == "int8_wo"
    assert [bool(one.refused) for one in profiles_per_release(job.arguments, job.request.weights)] == [False, True]
    with pytest.raises(InputError, match=r"TensorRT-LLM 1\.3 loads no INT8 weight-only checkpoint; build it again"):
        pytorch.target.prepare(spec("pytorch", tmp_path / "e", options={"image": "trtllm-1.3"}), source)


@pytest.mark.parametrize(
    ("family", "algorithm", "says"),
    [
        ("mixtral", "W4A16_AWQ", "its loader of 4-bit experts wants the input scales of FP8 activations; give"),
        ("phi3", "W4A16_AWQ", "its loader of the packed query, key and value matrix splits rows of weights"),
        ("phi3", "W8A16", "slices scales as a table of two dimensions"),
    ],
)
def test_modelopts_files_that_no_loader_takes_are_refused(checkpoint, tmp_path, family, algorithm, says):
    source = modelopt(checkpoint(family), tmp_path, algorithm)
    with pytest.raises(CheckpointError, match=says):
        pytorch.target.prepare(spec("pytorch", tmp_path / "e"), source)


@pytest.mark.parametrize(
    ("algorithm", "cache", "fields", "says"),
    [
        # llmapi/llm_utils.py, _update_from_hf_quant_config: "Pre-quantized checkpoint must have quant_algo."
        (None, "FP8", {}, "but names no quant_algo"),
        # QuantAlgo("NVFP4_AWQ") is a ValueError, and for the others get_quant_method has no layers
        ("NVFP4_AWQ", None, {"options": {"image": "26.07"}}, "which TensorRT-LLM's PyTorch backend does not load"),
        ("W8A8_SQ_PER_CHANNEL", None, {}, "does not load; give the full-precision checkpoint"),
        ("W4A16_GPTQ", None, {"options": {"image": "trtllm-1.3"}}, "does not load"),
        # validate_and_set_kv_cache_quant: "You cannot override a checkpoint with a pre-quantized KV cache"
        ("NVFP4", "NVFP4", {"kv_cache": "fp8"}, "KV cache in NVFP4: leave out --kv-cache fp8, or give"),
        ("FP8", "NVFP4", {"gpu": "h100-sxm"}, "KV cache in NVFP4, which needs a Blackwell GPU, not --gpu h100-sxm"),
        ("FP8", "INT8", {}, "KV cache in INT8, which"),
        # W4A16_AWQ_LinearMethod.create_weights: `in_features % group_size`, here of None
        ("W4A16_AWQ", None, {}, "names no group_size, without which"),
    ],
)
def test_modelopts_descriptions_that_the_backend_does_not_read(checkpoint, tmp_path, algorithm, cache, fields, says):
    more = {"group_size": None} if "group_size" in says else {}
    source = modelopt(checkpoint("llama"), tmp_path, algorithm, kv_cache_quant_algo=cache, **more)
    with pytest.raises(CheckpointError, match=says):
        make_request(spec("pytorch", **fields), source)


@pytest.mark.parametrize(
    ("algorithm", "cache", "asked", "has"),
    [
        ("FP8", "FP8", "auto", "fp8"), ("FP8", None, "auto", "auto"), ("FP8", None, "fp8", "fp8"),
        ("NVFP4", "NVFP4", "auto", "auto"), ("MIXED_PRECISION", "FP8", "fp8", "fp8"),
        ("fp8_pb_wo", "none", "auto", "auto"),
    ],
)  # fmt: skip
def test_the_kv_cache_that_a_checkpoint_brings(checkpoint, tmp_path, algorithm, cache, asked, has):
    source = modelopt(checkpoint("llama"), tmp_path, algorithm, kv_cache_quant_algo=cache)
    job = pytorch.target.prepare(spec("pytorch", tmp_path / "e", kv_cache=asked), source)
    assert (job.request.quantisation.kv_cache, job.arguments["kv_cache_config"]["dtype"]) == (has, has)
    assert job.request.exports_unchanged


@pytest.mark.parametrize(
    ("scheme", "has"),
    [({"dynamic": False, "num_bits": 8, "type": "float"}, "fp8"), ("NVFP4", "auto"), (None, "auto"), ("INT8", None)],
)
def test_the_kv_cache_that_a_description_in_config_json_names(checkpoint, tmp_path, scheme, has):
    """ModelOpt 0.47's export/convert_hf_config.py writes these; 1.3's quantization/modelopt_config.py reads them."""
    config = json.loads((checkpoint("llama").path / "config.json").read_text())
    inner = {"producer": {"name": "modelopt"}, "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    config["quantization_config"] = inner | {"kv_cache_scheme": scheme}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = open_checkpoint(str(tmp_path), weights=False)
    given = spec("pytorch", options={"image": "trtllm-1.3"})
    if has is None:
        with pytest.raises(CheckpointError, match="KV cache in INT8, which"):
            make_request(given, source)
    else:
        assert make_request(given, source).quantisation.kv_cache == has


def test_nemotron_3_in_nvfp4_is_passed_on_for_hopper(checkpoint, tmp_path):
    """1.3.0rc29 deployment-guide/deployment-guide-for-nemotron-3-on-trtllm: "The same NVFP4 checkpoint can also be
    served on Hopper", on which features/quantization lists NVFP4 for no other model.
    """
    newer = {"image": "trtllm-1.3"}
    source = modelopt(checkpoint("nemotron_h"), tmp_path, "NVFP4")
    assert make_request(spec("pytorch", gpu="h100-sxm", options=newer), source).is_prequantized
    with pytest.raises(CheckpointError, match="needs a Blackwell GPU, not --gpu l40s"):
        make_request(spec("pytorch", gpu="l40s", options=newer), source)


def test_the_layers_of_a_mixed_precision_are_checked_too(checkpoint, tmp_path):
    layers = {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
              "model.layers.0.mlp.down_proj": {"quant_algo": "MXFP8", "group_size": 32}}  # fmt: skip
    (tmp_path / "quant_cfg.json").write_text("{}")
    source = modelopt(checkpoint("llama"), tmp_path, "MIXED_PRECISION", quantized_layers=layers)
    assert "quant_cfg.json" in {file.path for file in source.files}  # model_config.py, load_modelopt_quant_config
    newer = {"image": "trtllm-1.3"}
    make_request(spec("pytorch", options=newer), source)
    with pytest.raises(CheckpointError, match="with layers in NVFP4, which needs a Blackwell GPU, not --gpu h100-sxm"):
        make_request(spec("pytorch", gpu="h100-sxm", options=newer), source)
    with pytest.raises(CheckpointError, match="with layers in MXFP8, which TensorRT-LLM's PyTorch backend does not"):
        make_request(spec("pytorch", options={"image": "26.07"}), source)


def made(job, folder):
    """Return the model's folder after a build in `folder`."""
    (folder / "work" / "tokenizer").mkdir(parents=True)
    job.build(folder / "work", SilentProgress())
    return folder / "work" / "model"


def test_a_plain_checkpoint_with_an_fp8_cache_stays_as_it_is(checkpoint, tmp_path, monkeypatch):
    """TensorRT-LLM refuses a quantisation file without an algorithm of the weights, so the arguments name the cache."""
    source = checkpoint("llama")
    job = pytorch.target.prepare(spec("pytorch", tmp_path / "e", kv_cache="fp8"), source)
    assert job.request.exports_unchanged
    assert not job.request.calibrates
    assert job.arguments["kv_cache_config"]["dtype"] == "fp8"
    model = made(job, tmp_path)
    assert not (model / "hf_quant_config.json").exists()
    weights = source.path / "model.safetensors"
    assert (model / "model.safetensors").samefile(weights)
    # the link, which changes the time of the inode, does not make the next build hash the weights again
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert sha256_of(weights) == digest
    # an edit in the engine changed the checkpoint
    editable = [path for path in source.path.iterdir() if path.suffix == ".json"]
    assert len(editable) > 1
    assert not any((model / path.name).samefile(path) for path in editable)


@pytest.mark.parametrize(("image", "has"), [("26.07", 5e5), ("trtllm-1.3", None)])
def test_a_checkpoint_of_transformers_5_keeps_its_rotation_for_transformers_4(tmp_path, image, has):
    """1.2.1 has transformers 4.57, whose LlamaConfig takes theta 10000 and no scaling from `rope_parameters`."""
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 64}  # fmt: skip
    rotation = {**scaled, "rope_theta": 5e5}
    source = open_checkpoint(str(write_checkpoint(tmp_path / "source", "llama", rope_parameters=rotation)))
    job = pytorch.target.prepare(spec("pytorch", tmp_path / "e", options={"image": image}), source)
    config = json.loads((made(job, tmp_path) / "config.json").read_text())
    assert config.get("rope_theta") == has
    assert config.get("rope_scaling") == (has and {**scaled, "type": "llama3"})
    before = json.loads((source.path / "config.json").read_text())
    assert "rope_theta" not in before
    assert {key: config[key] for key in before} == before


def test_a_model_with_encoders_is_passed_on_with_what_its_processor_reads(tmp_path):
    """Gemma3InputProcessor and Llama4InputProcessor read it as the engine starts (AutoProcessor.from_pretrained)."""
    source = write_checkpoint(tmp_path / "source", "gemma3")
    (source / "preprocessor_config.json").write_text('{"image_processor_type": "Gemma3ImageProcessor"}')
    job = pytorch.target.prepare(spec("pytorch", tmp_path / "e"), open_checkpoint(str(source)))
    assert (made(job, tmp_path) / "preprocessor_config.json").is_file()
    (source / "processor_config.json").write_text("[")
    with pytest.raises(CheckpointError, match="processor_config"):
        open_checkpoint(str(source))


def test_the_scaling_of_phi_is_as_transformers_4_wants_it():
    """4.57.3: "`rope_scaling` must be a dictionary with three fields, `type`, `short_factor` and `long_factor`"."""
    from transformers import Phi3Config

    factors = {"short_factor": [1.0] * 36, "long_factor": [2.0] * 36}
    original = {"rope_theta": 1e4, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", **factors}}  # fmt: skip
    loaded = Phi3Config(**copy.deepcopy(original))  # of Phi-4 mini
    written = with_transformers4_keys(loaded.to_dict())
    assert {key: written[key] for key in original} == original
    assert Phi3Config(**written).rope_parameters == loaded.rope_parameters


def test_experts_in_w4a8_are_not_for_blackwell(checkpoint, tmp_path):
    given = spec("pytorch", tmp_path / "e", quant="w4a8_awq", gpu="b200-sxm", options={"dtype": "bfloat16"})
    with pytest.raises(InputError, match="no kernels for w4a8_awq experts; use --quant fp8, or name an H100"):
        pytorch.target.prepare(given, checkpoint("mixtral"))


@pytest.mark.parametrize(("gpu", "right"), [(None, "bfloat16"), ("h100-sxm", "bfloat16"), ("l40s", "float16")])
def test_experts_in_w4a8_are_refused_in_the_dtype_that_is_misread(checkpoint, tmp_path, gpu, right):
    wrong = {"bfloat16": "float16", "float16": "bfloat16"}[right]
    fields = {"quant": "w4a8_awq", "gpu": gpu}
    misread, read = (spec("pytorch", tmp_path / "e", options={"dtype": one}, **fields) for one in (wrong, right))
    with pytest.raises(InputError, match=f"in {right} only on .*this model is {wrong}; add --set dtype={right}"):
        pytorch.target.prepare(misread, checkpoint("mixtral"))
    pytorch.target.prepare(read, checkpoint("mixtral"))
    # a dense model is read in either
    assert pytorch.target.prepare(misread, checkpoint("llama")).request.dtype == wrong


def test_calibration_defaults():
    """As NVIDIA's quantize.py on a GPU, an eighth of it on a CPU; AWQ takes eight at a time."""
    settings, limits = CalibrationSettings(), [FORMATS[name].calib_limit for name in ("fp8", "int4_awq")]
    assert settings.seq_len == 512
    assert [settings.resolved(gpu=True, limit=limit) for limit in limits] == [(512, 1), (32, 8)]
    assert [settings.resolved(gpu=False, limit=limit) for limit in limits] == [(64, 8), (8, 8)]
    assert CalibrationSettings(size=100, batch_size=3).resolved(gpu=False, limit=32) == (100, 3)


def test_texts_become_full_sequences():
    """Byte tokens: 3 texts of 10, each with an end token, are 33 ids."""

    class Bytes:
        eos_token_id = 0

        def __call__(self, text, truncation, max_length):
            return {"input_ids": list(text.encode())[:max_length]}

    found = pack_sequences(["a" * 10, "b" * 10, "c" * 10], Bytes(), size=8, seq_len=16)
    assert found == [[97] * 10 + [0] + [98] * 5, [98] * 5 + [0] + [99] * 10]
    assert len(pack_sequences(["a" * 100] * 9, Bytes(), size=4, seq_len=16)) == 4
    assert [tuple(batch.shape) for batch in batches(found, 8)] == [(2, 16)]
    assert [tuple(batch.shape) for batch in batches(found * 5, 8)] == [(5, 16), (5, 16)]


@pytest.mark.parametrize("target", [tensorrt.target, pytorch.target])
def test_calibration_data_is_refused_before_any_work(checkpoint, tmp_path, target):
    source, empty = checkpoint("llama"), tmp_path / "empty.jsonl"
    empty.write_text("")
    for data, says in ((tmp_path / "missing.txt", "does not exist"), (empty, "has no text")):
        spec = BuildSpec("x", tmp_path, target=target.name, quant="fp8", calib_dataset=str(data))
        with pytest.raises(InputError, match=says):
            target.prepare(spec, source)


def test_calibration_files(tmp_path):
    lines = [{"text": "one"}, {"messages": [{"role": "user", "content": "two"}, {"role": "a", "content": "three"}]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (tmp_path / "b.txt").write_text("one\ntwo\n\nthree\n")
    assert sorted(load_texts(CalibrationSettings(str(tmp_path / "a.jsonl")))) == ["one", "two\nthree"]
    assert sorted(load_texts(CalibrationSettings(str(tmp_path / "b.txt")))) == ["one\ntwo", "three"]
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n{"title": 1}\n')
    with pytest.raises(InputError, match="line 2 has no text"):
        load_texts(CalibrationSettings(str(tmp_path / "c.jsonl")))
    with pytest.raises(InputError, match="does not exist"):
        load_texts(CalibrationSettings(str(tmp_path / "d.txt")))


def test_calibration_rows_of_all_kinds(tmp_path):
    """Rows of chat and web sets: no text, parts of a message, calls of tools, and U+2028 within a string."""
    path = tmp_path / "rows.jsonl"
    parts = [{"type": "text", "text": "three"}, {"type": "image_url", "image_url": {}}]
    rows = [{"text": "a\u2028b\u0085c"}, {"text": ""}, {"text": "", "prompt": "two"},
            {"messages": [{"content": parts}, {"content": None}, {"content": "four"}]}]  # fmt: skip
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    assert sorted(load_texts(CalibrationSettings(str(path)))) == ["a\u2028b\u0085c", "three\nfour", "two"]
    wrong = dict.fromkeys(("5", "[1]", '{"messages": 1}', '{"messages": ["x"]}', "null"), "")
    for line, why in {**wrong, '{"text": "cut \\ud83d"}': r" \(a text in it has half of a surrogate pair\)"}.items():
        path.write_text(line)
        with pytest.raises(InputError, match=f"line 1 has no text{why};"):
            load_texts(CalibrationSettings(str(path)))
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_bytes(b"caf\xe9")
        with pytest.raises(InputError, match=r"is not UTF-8 \(byte 3\)"):
            load_texts(CalibrationSettings(str(tmp_path / name)))
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"cut")
    with pytest.raises(InputError, match="cannot be read as Parquet"):
        load_texts(CalibrationSettings(str(tmp_path / "a.parquet")))


@pytest.mark.parametrize(
    ("dataset", "files", "file"),
    [
        # sets of ModelOpt 0.47 (`modelopt/torch/utils/dataset_utils.py`), two of which have no `train`
        ("cnn_dailymail", ["README.md", "3.0.0/test-00000-of-00001.parquet", "3.0.0/train-00000-of-00003.parquet",
            "1.0.0/train-00000-of-00003.parquet"], "3.0.0/train-00000-of-00003.parquet"),
        ("nvidia/Nemotron-Post-Training-Dataset-v2", ["data/chat-00000-of-00012.parquet"],
            "data/chat-00000-of-00012.parquet"),
        ("nvidia/Nemotron-SFT-SWE-v2", ["data/agentless.jsonl", "LICENSE.txt"], "data/agentless.jsonl"),
        ("HuggingFaceH4/ultrachat_200k", ["data/test_sft-1.parquet", "data/train_sft-0.parquet"],
            "data/train_sft-0.parquet"),
        ("a/b", ["data.zip"], None),
    ],
)  # fmt: skip
def test_calibration_data_of_the_hub(tmp_path, monkeypatch, dataset, files, file):
    """One file is fetched by huggingface_hub, which every installation has."""
    import huggingface_hub
    from pyarrow import Table, parquet

    def fetched(name, chosen, repo_type):
        assert (name, chosen, repo_type) == (dataset.replace("cnn_", "abisee/cnn_"), file, "dataset")
        place = tmp_path / Path(chosen).name
        rows = [{"messages": [{"role": "user", "content": "one"}]}, {"messages": [{"role": "user", "content": "two"}]}]
        if place.suffix == ".jsonl":
            place.write_text("\n".join(map(json.dumps, rows)))
        else:
            parquet.write_table(Table.from_pylist([*rows, {"messages": None}]), place)
        return str(place)

    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name, repo_type: files)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetched)
    check_data(CalibrationSettings(dataset))
    if file is None:
        with pytest.raises(InputError, match=r"a/b has no \.jsonl or \.parquet file on the hub; give a local file"):
            load_texts(CalibrationSettings(dataset))
    else:
        assert sorted(load_texts(CalibrationSettings(dataset))) == ["one", "two"]


def test_the_image_that_quantises_reads_everything_that_a_build_may_get():
    """What --calib-data and GGUF files need beside the extra, none of which its user could install."""
    text = (Path(__file__).parents[2] / "Dockerfile.build").read_text()
    (line,) = [line for line in text.splitlines() if "[quantize]" in line]
    assert {"gguf", "pyarrow"} <= set(line.split())


def test_calibration_and_evaluation_share_nothing():
    calibration, evaluation = bundled_texts("calibration"), bundled_texts("evaluation")
    assert len(calibration) >= 32
    assert not set(calibration) & set(evaluation)
    assert load_texts(CalibrationSettings(size=8)) == load_texts(CalibrationSettings(size=8))


OFFICIAL = {
    "nvidia--Llama-3.1-70B-Instruct-FP8": "fp8",
    "Qwen--Qwen3-32B-FP8-Static-PerTensor": "fp8",
    "nvidia--DeepSeek-V3.1-NVFP4": None,
    "nvidia--Qwen3-235B-A22B-NVFP4": None,
}


@pytest.mark.parametrize("name", OFFICIAL)
def test_checkpoints_that_nvidia_publishes_are_passed_on(tmp_path, name):
    """Their config.json and hf_quant_config.json, as AIConfigurator's package has them."""
    root = package_root()
    if root is None:
        pytest.skip("AIConfigurator is not installed")
    for file in ("config.json", "hf_quant_config.json"):
        shutil.copy(root / "model_configs" / f"{name}_{file}", tmp_path / file)
    source = open_checkpoint(str(tmp_path), weights=False)
    given = spec("pytorch", tmp_path / "e", tp=8, gpu="h100-sxm")
    if OFFICIAL[name] is None:
        with pytest.raises(CheckpointError, match=r"modelopt NVFP4.*needs a Blackwell GPU, not --gpu h100-sxm"):
            pytorch.target.prepare(given, source)
        return
    request = pytorch.target.prepare(given, source).request
    assert (request.is_prequantized, request.weights) == (True, OFFICIAL[name])


# -- The table of formats: each row is whole, and the names that it gives lead somewhere


def test_presets_are_modelopts():
    mtq = pytest.importorskip("modelopt.torch.quantization")
    presets = [form.preset for form in FORMATS.values() if form.preset]
    assert len(presets) == 6
    assert [name for name in presets if not hasattr(mtq, name)] == []


def test_every_target_can_be_built_served_and_has_formats():
    for name in NAMES:
        assert get_target(name).name == find_target(name).name == name
        assert TARGETS[name].quant in buildable_formats(name)
