"""A model that is read layer by layer computes what the whole model does, and never holds more than it says."""

import pytest
import torch

from llmops.build.quality import layerwise_model
from llmops.build.quality.checkpoint_models import load_exported, open_source
from llmops.build.quality.reference_answers import greedy_decode
from llmops.build.quantize import embedding_tables
from llmops.build.quantize.model_loading import load_model

TEXTS = [[3, 7, 11, 250, 30, 31, 32, 5], [9] * 40, [4, 300]]
FAMILIES = ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "phi3", "deepseek_v3"]


@pytest.fixture(params=[True, False], ids=["small enough to be kept", "read every time"])
def keep(request, monkeypatch):
    monkeypatch.setattr(embedding_tables, "CACHED_TABLE_BYTES", 0)
    monkeypatch.setattr(embedding_tables, "BLOCK", 100)
    if not request.param:
        monkeypatch.setattr(layerwise_model, "CACHED_LAYERS_BYTES", 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_source(checkpoint, keep, family):
    source = checkpoint(family)
    whole, streamed = load_model(source), open_source(source)
    with torch.inference_mode():
        logits = [whole(torch.tensor([ids], device=whole.device)).logits[0, :-1] for ids in TEXTS]
        expected = [each.log_softmax(-1).cpu() for each in logits]
    for _ in range(2):
        for found, wanted in zip(streamed.log_probs(TEXTS), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with streamed.generating() as module:
        tokens, scores = greedy_decode(module, streamed.device, TEXTS, 6, set())
    wanted_tokens, wanted_scores = greedy_decode(whole, whole.device, TEXTS, 6, set())
    assert tokens == wanted_tokens
    torch.testing.assert_close(torch.tensor(scores), torch.tensor(wanted_scores), rtol=1e-4, atol=1e-4)


def test_one_layer_at_a_time(checkpoint, monkeypatch):
    """While a layer is in use, no other one's weights are anywhere in the model."""
    monkeypatch.setattr(layerwise_model, "CACHED_LAYERS_BYTES", 0)
    streamed = open_source(checkpoint("llama", num_hidden_layers=4))
    seen = []

    def visit(weights):
        here = {name.split(".")[2] for name, value in layers() if not value.is_meta}
        assert here == {name.split(".")[2] for name in weights}
        seen.extend(here)

    def layers():
        return [pair for pair in streamed.module.named_parameters() if ".layers." in pair[0]]

    list(streamed.log_probs(TEXTS, visit))
    assert seen == ["0", "1", "2", "3"]
    assert all(value.is_meta for _, value in layers())


@pytest.mark.parametrize("target", ["tensorrt", "pytorch"])
def test_an_export_that_is_too_large_to_be_kept(export, keep, target):
    """The same answers either way; test_quality_gate.py says which are right."""
    _, folder, source = export("mixtral", "fp8", target=target, kv="fp8")
    answers = torch.cat(list(load_exported(folder, target, source).log_probs(TEXTS)))
    whole = torch.cat(list(open_source(source).log_probs(TEXTS)))
    error = float((answers - whole).norm() / whole.norm())
    assert 1e-5 < error < 0.05
