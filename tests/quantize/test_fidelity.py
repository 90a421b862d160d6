"""The quality gate recognises a faulty weight, and does not mistake rounding for one."""

import pytest
import torch

from llmops.build.quality.measures import largest_difference, sketch

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
