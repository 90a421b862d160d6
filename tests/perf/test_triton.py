"""`llmops bench grpc://…` against the mock engine on the real Triton: what it says must be what that does."""

import pytest

from llmops.errors import ServerError
from llmops.perf.bench import bench
from llmops.perf.load.runner import run_async
from tests.support.load import options
from tests.support.mock_engine.repository import make_mock_engine
from tests.support.stack import triton

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("own-triton")]

PERIOD = 0.03


@pytest.fixture(scope="module")
def mock_engine(engine_dir, tmp_path_factory):
    """Address of a Triton whose model `mock` gives every stream a token each 30 ms."""
    with triton(make_mock_engine(engine_dir, tmp_path_factory.mktemp("mock") / "repository", PERIOD)) as server:
        yield f"grpc://{server.address}"


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
