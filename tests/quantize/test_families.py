"""Every format that a family is allowed on a target ("What loads" in docs/tensorrt-llm.md) is exported from a tiny
random model and read back within its rounding bound.

Every fifth cell by default, because all of them take minutes: LLMOPS_EVERY_CELL=1 runs the whole table.
"""

import json
import os
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from llmops.build.checkpoint import open_checkpoint
from llmops.build.checkpoint.known_models import known_model
from llmops.build.checkpoint.weight_sources import open_weights
from llmops.build.model.architecture import Architecture
from llmops.build.model.families import FAMILIES
from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.memory.weight_bytes import stage_weights
from llmops.build.quality.config_checks import check_hf_config
from llmops.build.quant_formats import FORMATS, format_of
from llmops.build.quantize.hf_checkpoint_reader import HfCheckpointReader
from llmops.build.quantize.rank_file_reader import RankFileReader
from llmops.build.targets.nvidia.build_request import allowed_formats
from tests.quantize.test_rank_files import check_within_bounds, read_all
from tests.support.tiny_models import export_quantised, write_checkpoint

CELLS = [
    (family, quant, target)
    for target in ("tensorrt", "pytorch")
    for family in FAMILIES
    if target in FAMILIES[family].targets
    for quant in allowed_formats(family, target)
    if quant != "none" or target == "tensorrt"  # pytorch passes an unquantised checkpoint on as it is
]


if not os.environ.get("LLMOPS_EVERY_CELL"):
    CELLS = CELLS[::5]

# whose inputs each norm scales
FED = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    "pre_feedforward_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


@pytest.mark.parametrize(
    ("hub_id", "name"),
    [
        ("Qwen/Qwen3.5-27B", "Qwen3_5TextConfig"),
        ("Qwen/Qwen3.5-397B-A17B", "Qwen3_5MoeTextConfig"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "NemotronHConfig"),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", "NemotronHConfig"),
    ],
)
def test_recurrent_models_have_as_many_weights_as_transformers_makes(hub_id, name):
    """Without the layer for multi-token prediction; Qwen's gates of shared experts, 10^-6 of all, are left out."""
    config = {**known_model(hub_id).config, "quantization_config": None}
    weights = stage_weights(Architecture.from_hf_config(config), format_of("none", "pytorch"), ParallelLayout(), 0)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**config))
    assert sum(weights.values()) / 2 == pytest.approx(sum(one.numel() for one in model.parameters()), rel=1e-5)


@pytest.mark.parametrize(("family", "quant", "target"), CELLS)
def test_a_cell_of_the_table(export, family, quant, target):
    grouped = FORMATS[quant].grouped
    weights, folder, _ = export(family, quant, target=target, tp=2, group=128 if grouped else None)
    reader = RankFileReader(folder, family) if target == "tensorrt" else HfCheckpointReader(folder)
    exported = read_all(reader)
    if grouped and target == "pytorch":
        weights = fold(weights, exported, offset=1.0 if family.startswith("gemma") else 0.0)
    tied = family.startswith("gemma")
    check_within_bounds(weights, exported, tied=tied, float16=target == "pytorch")


def fold(weights, exported, offset):
    """The source with AWQ's input scales moved into the norms before, as ModelOpt moves them in a Hugging Face
    checkpoint: norm and weight change, their product does not. `offset`: Gemma's norms scale by 1 + weight."""
    folded = dict(weights)
    for name, norm in weights.items():
        layer, _, kind = name.removesuffix(".weight").rpartition(".")
        consumers = [f"{layer}.{module}.weight" for module in FED.get(kind, ())]
        if not consumers or not all(consumer in weights for consumer in consumers):
            continue
        scale = (exported.weights[name] + offset) / (norm + offset)
        folded[name] = exported.weights[name]
        for consumer in consumers:
            folded[consumer] = weights[consumer] / scale
            # the scale is read back from a norm that was rounded to float16
            exported.bounds[consumer] = exported.bounds[consumer] + folded[consumer].abs() * 2.0**-10
    return folded


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma_with_encoders_is_quantised_as_its_text_part(tmp_path, prefix):
    """google/gemma-3-27b-it has the first names, what transformers saves since 4.52 the second."""
    text = write_checkpoint(tmp_path / "text", "gemma3")
    whole = tmp_path / "whole"
    shutil.copytree(text, whole)
    config = json.loads((text / "config.json").read_text())
    outer = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": config}
    (whole / "config.json").write_text(json.dumps(outer))
    weights = load_file(text / "model.safetensors")
    named = {name.replace("model.", prefix, 1): weight for name, weight in weights.items()}
    save_file(named | {"vision_tower.weight": torch.ones(2)}, whole / "model.safetensors", {"format": "pt"})
    files = []
    for folder in (text, whole):
        source, exported = open_checkpoint(str(folder)), folder.with_name(f"{folder.name}-fp8")
        export_quantised(source, exported, format_of("fp8", "pytorch"), "pytorch", kv="fp8")
        check_hf_config(json.loads((exported / "config.json").read_text()), source.config)
        assert json.loads((exported / "config.json").read_text())["architectures"] == ["Gemma3ForCausalLM"]
        files.append(load_file(exported / "model.safetensors"))
        stored = open_weights(source)
        assert all(stored.has(name) for name in weights)
        assert (stored.get("model.norm.weight").float32() == weights["model.norm.weight"].numpy()).all()
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name].float(), files[1][name].float()) for name in files[0])


def test_sampling_settings_that_transformers_does_not_save_are_exported(tmp_path):
    """transformers 5.5 generation/configuration_utils.py, save_pretrained: "GenerationConfig is invalid"."""
    folder, exported = write_checkpoint(tmp_path / "source", "llama"), tmp_path / "exported"
    given = {"eos_token_id": [2, 3], "temperature": 0.6, "num_beams": 1, "early_stopping": True}
    (folder / "generation_config.json").write_text(json.dumps(given))
    export_quantised(open_checkpoint(str(folder)), exported, format_of("fp8", "pytorch"), "pytorch", size=1, seq_len=8)
    assert json.loads((exported / "generation_config.json").read_text()).items() >= given.items()
