"""`llmops bench grpc://…` against the mock engine on the real Triton: what it says must be what that does."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.errors import ServerError
from llmops.perf.bench import bench
from llmops.perf.load.runner import run_async
from tests.support.load import options
from tests.support.mock_engine.repository import make_mock_engine
from tests.support.stack import triton

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("own-triton")]

PERIOD = 0.03


@pytest.fixture(scope="module")
def mock_engine(tmp_path_factory):
    """Address of a Triton whose model `mock` gives every stream a token each 30 ms."""
    engine = tmp_path_factory.mktemp("engine")
    _write_engine(engine)
    with triton(make_mock_engine(engine, engine / "repository", PERIOD)) as server:
        yield f"grpc://{server.address}"


def _write_engine(engine):
    """Tokenizer and manifest, no weights. The tokenizer has one token per byte."""
    (engine / "tokenizer").mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={"<end>": 0} | {c: i for i, c in enumerate(alphabet, 1)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(engine / "tokenizer" / "tokenizer.json"))
    (engine / "tokenizer" / "tokenizer_config.json").write_text("{}")
    manifest = {
        "key": "0" * 64,
        "name": "mock",
        "target": "openvino",
        "architecture": "LlamaForCausalLM",
        "source": {"checkpoint": "none", "format": "gguf", "files": []},
        "versions": {},
        "limits": {"max_batch_size": 64, "max_seq_len": 4096, "max_num_tokens": 256},
        "tokenizer": {"vocab_size": 257, "end_ids": [0], "chat_template": False},
        "extra": {"openvino": {"kv_cache": {"layers": 1, "kv_heads": 1, "head_dim": 64}}},
    }
    (engine / "engine.json").write_text(EngineManifest(**manifest).model_dump_json())


def run(url, **given):
    return run_async(bench(options(url, **{"output": 12, "requests": 12, "concurrency": 4, "warmup": 0, **given})))


def test_the_engine_model_gives_every_token_at_the_mock_engines_pace(mock_engine):
    summary = run(mock_engine).summary
    assert (summary.completed, summary.errors) == (12, {})
    assert (summary.tokens_out, summary.tokens_source) == (12 * 12, "usage")
    # steps keep to the mock engine's clock, so only how late the first and the last token were seen can differ
    assert summary.itl.count == 12 * 11
    assert summary.tpot.p50 > 1000 * PERIOD / 2


def test_the_ensemble_gives_text_and_says_that_it_was_counted(mock_engine):
    summary = run(mock_engine, via="ensemble", requests=4).summary
    assert (summary.completed, summary.errors) == (4, {})
    assert summary.tokens_source == "chunks"
    assert 0 < summary.tokens_out <= 4 * 12


def test_a_cancelled_stream_ends_early(mock_engine):
    summary = run(mock_engine, cancel_share=1.0, output=100, requests=4).summary
    assert (summary.cancelled, summary.failed) == (4, 0)
    assert 4 <= summary.tokens_out < 400


def test_a_refusal_of_the_engine_is_an_error_by_its_tensor(mock_engine):
    summary = run(mock_engine, output=300_000, requests=2).summary
    assert (summary.completed, list(summary.errors.values())) == (0, [2])
    assert "request_output_len" in next(iter(summary.errors))


def test_a_model_that_is_not_there_is_said_at_once(mock_engine):
    with pytest.raises(ServerError, match="does not serve other-tensorrt_llm"):
        run(mock_engine, model="other")
