"""The IR computes what transformers computes, in every supported family and stored precision."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from llmops.build.checkpoint.weight_sources import Weight
from llmops.build.engine_folder.manifest import EngineManifest
from llmops.build.job.build_engine import build
from llmops.build.spec import BuildSpec
from llmops.build.targets.openvino.weight_compression import Int4Storage, Int8Storage
from llmops.errors import CheckpointError, InputError
from tests.support.engines import int8_smollm2_engine
from tests.support.tiny_models import edit_config

from .conftest import VARIANTS, make_checkpoint

ov = pytest.importorskip("openvino")
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
PROMPT = np.array([[0, 17, 250, 33, 9, 120, 64, 5, 201, 77, 12]])


def reference_logits(folder: Path, ids: np.ndarray) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor(ids)).logits.numpy()


def run(model_dir: Path, ids: np.ndarray, chunks: list[int], properties: dict[str, str] = EXACT) -> np.ndarray:
    """Logits of a sequence that is fed in pieces, so that the KV state is used."""
    request = ov.compile_model(model_dir / "openvino_model.xml", "CPU", properties).create_infer_request()
    outputs, past = [], 0
    for size in chunks:
        inputs = {
            "input_ids": ids[:, past : past + size],
            "attention_mask": np.ones((1, past + size), np.int64),
            "position_ids": np.arange(past, past + size)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        outputs.append(request.infer(inputs)["logits"].copy())
        past += size
    return np.concatenate(outputs, axis=1)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "phi3"])
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", variant)
    build(BuildSpec(checkpoint=str(folder), output=tmp_path / "engine"))
    logits = run(tmp_path / "engine" / "model", PROMPT, [6, 1, 4])
    expected = reference_logits(folder, PROMPT)
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_weights_are_kept_and_exact(dtype: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", dtype=dtype)
    build(BuildSpec(checkpoint=str(folder), output=tmp_path / "engine"))
    expected = reference_logits(folder, PROMPT)
    logits = run(tmp_path / "engine" / "model", PROMPT, [11])
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())
    size = (tmp_path / "engine/model/openvino_model.bin").stat().st_size
    assert size < 1.1 * (folder / "model.safetensors").stat().st_size


def test_other_families_go_through_optimum_intel(tmp_path: Path) -> None:
    pytest.importorskip("optimum.intel")
    folder = make_checkpoint(tmp_path / "checkpoint", "phi3")
    build(BuildSpec(checkpoint=str(folder), output=tmp_path / "engine"))
    logits, expected = run(tmp_path / "engine" / "model", PROMPT, [6, 5]), reference_logits(folder, PROMPT)
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())
    names = {path.name for path in (tmp_path / "engine" / "model").iterdir()}
    written = {f"openvino_{part}.{end}" for part in ("model", "detokenizer") for end in ("xml", "bin")}
    assert names == written | {"generation_config.json"}


def matrix_from(storage: Any, values: np.ndarray, blocks: str | None = None, data: Any = None) -> np.ndarray:
    weight = Weight(values if data is None else data, values.shape, "f32", blocks)
    node = storage.matrix(weight)
    anchor = ov.opset13.parameter([1], np.float32)
    model = ov.Model([ov.opset13.add(node, anchor)], [anchor], "matrix")
    return ov.compile_model(model, "CPU", EXACT)(np.zeros(1, np.float32))[0]


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32 - 1), shift=st.floats(-2, 2), size=st.floats(1e-3, 10), levels=st.sampled_from([15, 255])
)
def test_compressed_weights_are_within_one_step(seed: int, shift: float, size: float, levels: int) -> None:
    """Rounding a value costs half a step, rounding the zero point another half."""
    values = ((np.random.default_rng(seed).standard_normal((6, 64)) + shift) * size).astype(np.float32)
    group = 32 if levels == 15 else 64
    got = matrix_from(Int4Storage(32) if levels == 15 else Int8Storage(), values)
    grouped, restored = values.reshape(6, -1, group), got.reshape(6, -1, group)
    span = np.maximum(grouped.max(-1), 0) - np.minimum(grouped.min(-1), 0)
    assert (np.abs(restored - grouped).max(-1) <= 1.01 * span / levels + 1e-6).all()


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_a_quantised_engine_computes_with_its_rounded_weights(quant: str, tiny: Path, tmp_path: Path) -> None:
    """Against transformers with the same matrices rounded; which ones are, and how far, is checked above."""
    manifest, _ = build(BuildSpec(checkpoint=str(tiny), output=tmp_path / "engine", quant=quant))
    assert (manifest.quantisation.weights, manifest.quantisation.group_size) == (quant, {"int4": 32}.get(quant))
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        whole = "embed_tokens" in name or "lm_head" in name or quant == "int8"
        if parameter.dim() == 2:
            storage = Int8Storage() if whole else Int4Storage(32)
            parameter.data = torch.tensor(matrix_from(storage, parameter.data.numpy()))
    with torch.no_grad():
        expected = model(torch.tensor(PROMPT)).logits.numpy()
    logits = run(tmp_path / "engine" / "model", PROMPT, [6, 5], {**EXACT, "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"})
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())
    size = (tmp_path / "engine/model/openvino_model.bin").stat().st_size
    assert size < 0.35 * (tiny / "model.safetensors").stat().st_size


def test_a_deterministic_engine_answers_alone_as_it_does_in_a_batch(tiny: Path, tmp_path: Path) -> None:
    """INT8 with OpenVINO's own settings does not: most of these answers differ there.

    The settings are those of a tiny engine, whose own answers would be the same in any case.
    """
    genai = pytest.importorskip("openvino_genai")
    from tokenizers import Tokenizer

    engine = int8_smollm2_engine()
    settings, _ = build(BuildSpec(checkpoint=str(tiny), output=tmp_path / "tiny", quant="int8", deterministic=True))
    runtime, scheduler = settings.extra.openvino, genai.SchedulerConfig()
    assert runtime.properties != EngineManifest.load(engine).extra.openvino.properties
    tokenizer = Tokenizer.from_file(str(engine / "tokenizer" / "tokenizer.json"))
    topics = ["cats", "the sea", "Paris", "bread", "chess"]
    prompts = [tokenizer.encode(prompt_of(f"Tell me something about {topic}.")).ids for topic in topics]
    scheduler.cache_size, scheduler.max_num_batched_tokens = 1, 256
    pipeline = genai.ContinuousBatchingPipeline(str(engine / "model"), scheduler, runtime.device, runtime.properties)
    config = genai.GenerationConfig(max_new_tokens=16, do_sample=False)

    def answers(batch: list[list[int]]) -> list[list[int]]:
        results = pipeline.generate([ov.Tensor(np.array([ids])) for ids in batch], [config] * len(batch))
        return [list(result.m_generation_ids[0]) for result in results]

    assert answers(prompts) == [answers([prompt])[0] for prompt in prompts]


def prompt_of(user: str) -> str:
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


def spec_of(tiny: Path, tmp_path: Path, **fields: Any) -> BuildSpec:
    return BuildSpec(checkpoint=str(tiny), output=tmp_path / "engine", **fields)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"quant": "fp8"}, "--quant fp8 is not for --target openvino; use one of none, int8, int4"),
        ({"kv_cache": "fp8"}, "--kv-cache fp8 is not for --target openvino"),
        ({"tp": 2}, "runs on one CPU"),
        (
            {"deterministic": True, "kv_cache": "u8"},
            "--deterministic needs a float32 KV cache; leave out --kv-cache u8",
        ),
        ({"group_size": 32}, "--group-size needs --quant int4"),
        ({"quant": "int4", "group_size": 48}, "--group-size 48 does not divide the layer size"),
        ({"max_seq_len": 9999}, "--max-seq-len 9999 is over the model's context; use at most 256"),
        ({"options": {"colour": "red"}}, "has no setting --set colour"),
    ],
)
def test_flags_that_do_not_fit(tiny: Path, tmp_path: Path, fields: dict, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        build(spec_of(tiny, tmp_path, **fields))
    assert not (tmp_path / "engine").exists()


def test_an_already_quantised_checkpoint_is_refused(copy_of_tiny: Path, tmp_path: Path) -> None:
    edit_config(copy_of_tiny, quantization_config={"quant_method": "awq"})
    with pytest.raises(CheckpointError, match=r"already quantised \(awq\)"):
        build(spec_of(copy_of_tiny, tmp_path))


def test_a_missing_tensor_is_named_and_nothing_is_left(copy_of_tiny: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(copy_of_tiny / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy_of_tiny / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        build(spec_of(copy_of_tiny, tmp_path))
    assert [path.name for path in tmp_path.iterdir() if "engine" in path.name] == []
