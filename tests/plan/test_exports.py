"""The plan's bytes of weights against what ModelOpt and OpenVINO really write: within 1 %."""

import json
from dataclasses import replace

import pytest

from llmops.build.model.architecture import Architecture
from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.memory.weight_bytes import checkpoint_weights, rank_weights
from llmops.build.quant_formats import FORMATS
from llmops.errors import InputError
from tests.support.commands import llmops
from tests.support.tiny_models import write_checkpoint

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "max_position_embeddings": 2048, "vocab_size": 1024}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
SMALL = {**SIZES, "architectures": ["LlamaForCausalLM"], "torch_dtype": "float16"}
SMOLLM2 = {"architecture": "LlamaForCausalLM", "hidden_size": 576, "num_layers": 30, "model": "smollm2"}


def quantised(preset: str):
    """A random Llama of those shapes, quantised with ModelOpt."""
    torch = pytest.importorskip("torch")
    quantization = pytest.importorskip("modelopt.torch.quantization")
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)).float()
    tokens = torch.arange(32).reshape(1, 32)
    return quantization.quantize(model, getattr(quantization, preset), lambda each: each(tokens))


@pytest.mark.parametrize(("preset", "name", "tp"), [("FP8_DEFAULT_CFG", "fp8", 4), ("INT4_AWQ_CFG", "int4_awq", 2)])
def test_modelopt_ranks(tmp_path, preset, name, tp):
    model = quantised(preset)
    import torch
    from modelopt.torch.export import export_tensorrt_llm_checkpoint

    with torch.inference_mode():
        export_tensorrt_llm_checkpoint(model, "llama", torch.float16, tmp_path, inference_tensor_parallel=tp)
    planned = sum(rank_weights(Architecture.from_hf_config(SMALL), FORMATS[name], ParallelLayout(tp)).values())
    for rank in range(tp):
        assert tensor_bytes(tmp_path / f"rank{rank}.safetensors") == pytest.approx(planned, rel=0.01)


def tensor_bytes(path) -> int:
    """Bytes of a rank's tensors. ModelOpt writes the scales of groups in FP32 when it calibrates in FP32; the engine
    holds them in FP16."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            total += (end - begin) // (2 if name.endswith("weights_scaling_factor") and len(tensor["shape"]) > 1 else 1)
    return total


def plan_file(tmp_path, **fields):
    sizes = {"tp_size": 1, "pp_size": 1, "ep_size": 1}
    limits = {"max_batch_size": 7, "max_num_tokens": 512, "max_seq_len": 1024, "kv_cache_fraction": 0.8}
    kind = {"target": "openvino", "gpu": "cpu", "quantisation": "int8", "kv_cache_dtype": "bf16"}
    plan = {**sizes, **limits, **kind, **SMOLLM2, **fields}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    return path


@pytest.mark.parametrize(("quant", "group"), [("int8", None), ("int4", 64)])
def test_build_obeys_the_plan_and_writes_what_it_said(tmp_path, quant, group):
    pytest.importorskip("openvino")
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "max_position_embeddings")}
    source = write_checkpoint(tmp_path / "tiny", "llama", **sizes)
    shapes = {"hidden_size": 512, "num_layers": 2, "model": "tiny"}
    path = plan_file(tmp_path, quantisation=quant, group_size=group, **shapes)
    llmops("build", source, "-o", tmp_path / "engine", "--plan", path)
    manifest = json.loads((tmp_path / "engine" / "engine.json").read_text())
    assert manifest["limits"] == {"max_batch_size": 7, "max_seq_len": 1024, "max_num_tokens": 512}
    assert manifest["plan"]["kv_cache_fraction"] == 0.8
    from llmops.build.checkpoint import open_checkpoint

    precision = replace(FORMATS[quant], group=group or FORMATS[quant].group)
    planned = sum(checkpoint_weights(open_checkpoint(str(source)).architecture, precision).values())
    written = (tmp_path / "engine" / "model" / "openvino_model.bin").stat().st_size
    assert written == pytest.approx(planned, rel=0.01)


OTHER = {"model": "meta-llama/Llama-3.1-8B", "hidden_size": 4096, "num_layers": 32}


@pytest.mark.parametrize(
    ("fields", "flags", "said"),
    [
        ({}, ("--max-batch-size", "9"), r"--max-batch-size 9 contradicts .*, which plans 7"),
        (OTHER, (), r"The plan is for meta-llama/Llama-3\.1-8B .*not for this checkpoint"),
    ],
)
def test_a_plan_for_another_batch_or_model_is_refused(tmp_path, fields, flags, said):
    path = plan_file(tmp_path, **fields)
    with pytest.raises(InputError, match=said):
        llmops("build", "smollm2", "-o", tmp_path / "engine", "--plan", path, *flags)
    assert not (tmp_path / "engine").exists()
