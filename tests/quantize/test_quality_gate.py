"""The gate passes a sound export and stops planted faults; it reads the files, so faults are planted there."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmops.build.quality.checkpoint_models import load_exported, open_source
from llmops.build.quality.export_comparison import compare_export
from llmops.build.quality.measures import Comparison, largest_difference, sketch
from llmops.build.quality.quality_gates import QualityGates
from llmops.build.quality.reference_answers import ReferenceAnswers
from llmops.build.tokenizer import write_tokenizer
from llmops.errors import BuildError, InputError
from tests.support.tiny_models import edit_config

# what `llmops build --quant fp8` uses
GATES = QualityGates.from_options({}, "fp8")
# a random model prefers no token, so any rounding changes its choice
PEAKY = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
         "fitted": True}  # fmt: skip


@pytest.fixture
def reference(checkpoint, tmp_path, monkeypatch):
    """Return the source's recorded answers, on fewer texts than a build takes."""
    from llmops.build.quality import reference_answers as module

    texts = module.bundled_texts
    monkeypatch.setattr(module, "bundled_texts", lambda name: [text[:200] for text in texts(name)][:3])

    def record(family):
        source = checkpoint(family, **PEAKY)
        write_tokenizer(source, tmp_path / "tokenizer", print)
        return ReferenceAnswers.record(open_source(source), source, tmp_path / "tokenizer", tmp_path / "reference")

    return record


def scale_stored(folder, name, factor):
    """Multiply a tensor in each file of an export."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        tensors[name] *= factor
        save_file(tensors, path)


@pytest.mark.parametrize("target", ["tensorrt", "pytorch"])
def test_a_sound_export_passes(export, reference, target):
    recorded = reference("llama")
    _, folder, source = export("llama", "fp8", target=target, tp=2 if target == "tensorrt" else 1, kv="fp8", **PEAKY)
    quality = compare_export(load_exported(folder, target, source), recorded)
    GATES.check(quality)
    assert quality.mean_kl > 0
    assert quality.tokens == sum(len(ids) - 1 for ids in recorded.texts)


MLP, VALUE = "layers.1.mlp.proj", "layers.1.self_attn.v_proj"


@pytest.mark.parametrize(
    ("target", "tp", "name", "factor", "said"),
    [
        ("tensorrt", 2, f"transformer.{MLP}.weights_scaling_factor", 8, r"mlp.down_proj.weight differs by (69|70)\d%"),
        # half a percent of perplexity at most, so only the weights themselves show it
        ("pytorch", 1, f"model.{VALUE}.weight_scale", 1.2, r"self_attn.v_proj.weight differs by 20%"),
        ("tensorrt", 1, f"transformer.{MLP}.activation_scaling_factor", 0.02, "mlp.down_proj .*covers only"),
        ("tensorrt", 1, f"transformer.{MLP}.activation_scaling_factor", 100.0, "mlp.down_proj .*times the range"),
    ],
)
def test_a_wrong_scale_in_one_layer(export, reference, target, tp, name, factor, said):
    recorded = reference("llama")
    _, folder, source = export("llama", "fp8", target=target, tp=tp, **PEAKY)
    scale_stored(folder, name, factor)
    prefix = "range of " if "activation" in name else ""
    with pytest.raises(BuildError, match=f"{prefix}model.layers.1.{said}"):
        GATES.check(compare_export(load_exported(folder, target, source), recorded))


def test_a_wrong_top_k_of_the_experts(export, reference):
    recorded = reference("mixtral")
    _, folder, source = export("mixtral", "fp8", tp=2, **PEAKY)
    GATES.check(compare_export(load_exported(folder, "tensorrt", source), recorded))
    config = json.loads((folder / "config.json").read_text())
    config["moe"]["top_k"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BuildError, match=r"moe.top_k = 1, and the source has 2"):
        load_exported(folder, "tensorrt", source)


@pytest.mark.parametrize(("field", "value"), [("num_experts_per_tok", 1), ("rope_theta", 100.0), ("rms_norm_eps", 0.1)])
def test_a_wrong_hugging_face_config(export, field, value):
    _, folder, source = export("mixtral", "fp8", target="pytorch")
    edit_config(folder, **{field: value})
    with pytest.raises(BuildError, match=rf"config.json has {field} = {value}, and the source has"):
        load_exported(folder, "pytorch", source)


def test_the_figures_of_two_known_distributions():
    """p = (1/2, 1/2), q = (1/4, 3/4): KL = ln 2 - ln 3 / 2; the right token is the first, then the second."""
    p, q = torch.tensor([[0.5, 0.5]] * 2).log(), torch.tensor([[0.25, 0.75]] * 2).log()
    comparison = Comparison()
    comparison.add(p, q, torch.tensor([0, 1]))
    kl = pytest.approx(math.log(2) - math.log(3) / 2)
    assert (comparison.mean_kl, comparison.kl_worst) == (kl, kl)
    ratio = pytest.approx(math.sqrt(4 * 4 / 3) / 2)
    assert (comparison.perplexity, comparison.perplexity_ratio) == (pytest.approx(2.0), ratio)
    assert comparison.top1_agreement == 0.0  # ties go to the first of p


def test_an_export_that_is_certain_of_other_tokens_is_measured():
    """Its perplexity is beyond floating-point numbers, which no engine.json holds."""
    comparison = Comparison()
    comparison.add(torch.tensor([[0.0, -50.0]]), torch.tensor([[-2000.0, 0.0]]), torch.tensor([0]))
    assert comparison.perplexity_ratio == pytest.approx(math.exp(100))


def test_limits_come_from_the_user():
    gates = QualityGates.from_options({"max_ppl_ratio": "1.5"}, "fp8")
    assert (gates.max_ppl_ratio, gates.min_top1) == (1.5, GATES.min_top1)
    with pytest.raises(InputError, match="--min-top1 'high' is not a number"):
        QualityGates.from_options({"min_top1": "high"}, "fp8")


# -- The quality gate recognises a faulty weight, and does not mistake rounding for one


NORM = "model.layers.1.input_layernorm.weight"
FED = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]


@pytest.fixture
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=2, **sizes))


def weights(model):
    return sketch(dict(model.named_parameters()), model.config)


def scale(model, names, factor):
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).mul_(factor)


def test_scales_that_move_from_weights_into_their_norm_are_no_fault(model):
    """AWQ moves scales so in a Hugging Face checkpoint, and the answers stay the same."""
    ids, source = torch.arange(16)[None], weights(model)
    expected = model(ids).logits
    factor = torch.rand(64) + 0.5
    scale(model, [NORM], factor)
    scale(model, FED, 1 / factor)
    assert torch.allclose(model(ids).logits, expected, atol=1e-5)
    assert largest_difference(weights(model), source)[0] < 1e-6


@pytest.mark.parametrize("names", [[NORM], FED[:1], FED[2:], ["model.norm.weight"]])
def test_scales_on_one_side_only_are_a_fault(model, names):
    source = weights(model)
    scale(model, names, 1.2)
    error, where = largest_difference(weights(model), source)
    assert error == pytest.approx(0.2, rel=1e-3)
    assert where in (*FED, "model.norm.weight")
