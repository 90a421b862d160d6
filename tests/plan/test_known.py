"""The table of well-known models: against published parameter counts, against AIConfigurator's files, and as ids."""

import json

import pytest

from llmops.build.checkpoint import open_checkpoint
from llmops.build.checkpoint.known_models import TABLE, KnownModel, known_model, known_models, model_suggestion
from llmops.build.model.architecture import Architecture
from llmops.build.model.families import FAMILIES
from llmops.build.plan.memory.weight_bytes import DTYPE_BYTES, checkpoint_weights
from llmops.build.plan.timing.silicon import package_root
from llmops.build.quant_formats import FORMATS

MODELS = known_models()
DECODERS = [model for model in MODELS if not model.hf_class.endswith("Model")]
ENCODERS = [model for model in MODELS if model.hf_class.endswith("Model")]


def decoder_parameters(model: KnownModel) -> int:
    architecture = Architecture.from_hf_config(model.config)
    bytes_ = sum(checkpoint_weights(architecture, FORMATS["none"]).values())
    return bytes_ // DTYPE_BYTES[architecture.dtype]


def encoder_parameters(model: KnownModel) -> int:
    """BERT's layout: three embeddings with a norm, and per layer four square matrices, two of the MLP, two norms."""
    c = model.config
    wide, inner = c["hidden_size"], c["intermediate_size"]
    embeddings = (c["vocab_size"] + c["max_position_embeddings"] + c["type_vocab_size"] + 2) * wide
    layer = 4 * (wide * wide + wide) + 2 * wide * inner + inner + wide + 4 * wide
    return embeddings + c["num_hidden_layers"] * layer


def test_at_least_60_models_of_every_family_people_deploy():
    rows = json.loads(TABLE.read_text())["models"]
    assert len(rows) >= 60
    assert {Architecture.from_hf_config(model.config).family for model in DECODERS} == set(FAMILIES)


@pytest.mark.parametrize("model", [m for m in DECODERS if m.parameters], ids=lambda m: m.id)
def test_a_models_shapes_give_its_published_parameters(model: KnownModel):
    assert decoder_parameters(model) == pytest.approx(model.parameters, rel=0.01)


@pytest.mark.parametrize("model", ENCODERS, ids=lambda m: m.id)
def test_an_encoders_shapes_give_its_published_parameters(model: KnownModel):
    assert encoder_parameters(model) == pytest.approx(model.parameters, rel=0.01)


def test_what_aiconfigurator_knows_too_it_knows_the_same():
    root = package_root()
    if root is None:
        pytest.skip("AIConfigurator is not installed")
    compared = []
    for model in DECODERS:
        file = root / "model_configs" / f"{model.id.replace('/', '--')}_config.json"
        if file.is_file():
            theirs = Architecture.from_hf_config(json.loads(file.read_text()))
            assert Architecture.from_hf_config(model.config) == theirs, model.id
            compared.append(model.id)
    assert len(compared) >= 15


def test_an_id_is_found_in_any_case_and_spelt_as_the_hub_does():
    found = known_model("META-LLAMA/llama-3.3-70b-instruct")
    assert found is not None
    assert found.id == "meta-llama/Llama-3.3-70B-Instruct"
    assert known_model("meta-llama/Llama-3.3-70B-Instruct@main") is None


@pytest.mark.parametrize("typed", ["meta-llama/Llama-3.3-70B-Instuct", "Llama-3.3-70B-Instruct", "llama-3.3-70b"])
def test_a_near_name_is_named(typed: str):
    assert "meta-llama/Llama-3.3-70B-Instruct" in model_suggestion(typed)


def test_a_name_near_nothing_gets_no_hint():
    assert model_suggestion("acme/quarterly-report") == ""


def test_planning_a_checkpoint_by_id_reads_no_file_and_asks_nobody(monkeypatch):
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: pytest.fail("the network was asked"))
    checkpoint = open_checkpoint("deepseek-ai/deepseek-r1", weights=False)
    assert (checkpoint.ref, checkpoint.name) == ("deepseek-ai/DeepSeek-R1", "deepseek-r1")
    assert checkpoint.quantisation is not None
    assert checkpoint.quantisation.method == "fp8"
    assert not checkpoint.files
