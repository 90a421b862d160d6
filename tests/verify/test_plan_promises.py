"""Capacity, speed and step times against a plan, and what cannot be looked at; on the mock engine on a real Triton."""

from pathlib import Path

import pytest

from llmops.build.engine_folder.manifest import FILE_NAME, EngineManifest
from llmops.build.plan.speed.measured_steps import MeasuredSteps
from tests.support.forked_cli import run
from tests.support.mock_engine.repository import make_mock_engine

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("own-triton"), pytest.mark.timeout(600)]

# of a mock engine that gives a token each 4 ms: a plan that any machine keeps, and one that none does
SLOW = {"concurrency": 3.0, "rate": 8.0, "ttft": 60.0, "tpot": 10.0, "tokens_per_second": 0.01}
FAST = {"concurrency": 40.0, "rate": 1e8, "ttft": 1e-6, "tpot": 1e-6, "tokens_per_second": 1e9}


def planned(engine: Path, folder: Path, point: dict[str, float], kv_tokens: int, **limits: int) -> Path:
    """A folder with nothing but the promises of an engine."""
    predicted = {
        "kind": "aggregated", "isl": 40, "osl": 8, "single": point, "point": point,
        "kv_cache_bytes_per_gpu": kv_tokens * 1000, "kv_bytes_per_token": 1000,
    }  # fmt: skip
    plan = {"chunked_prefill": True, "max_batch_size": 8, "max_seq_len": 4096, "predicted": predicted, **limits}
    folder.mkdir()
    manifest = EngineManifest.load(engine)
    (folder / FILE_NAME).write_text(manifest.model_copy(update={"plan": plan}).text())
    return folder


@pytest.fixture(scope="module")
def served(serve, engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    repository = tmp_path_factory.mktemp("mock") / "repository"
    return serve(make_mock_engine(engine_dir, repository, 0.004, max_batch_size=8))


PARTS = ("--only", "capacity", "--only", "speed")


def test_a_plan_that_is_kept(verify, served, engine_dir: Path, tmp_path: Path) -> None:
    found = verify(*served, *PARTS, "--engine", planned(engine_dir, tmp_path / "engine", SLOW, 32_768))
    assert found.report["faults"] == []
    assert found.detail("KV cache") == "1,024 blocks of 32 tokens: 32,768 tokens, 1.00 of the plan's"
    assert "3 streams: " in found.detail("operating point")
    (speed,) = [one for one in found.report["results"] if one["name"] == "one stream"]
    assert min(speed["figures"][f"{name}_ratio"] for name in ("TTFT", "TPOT", "tokens/s")) > 0.8


def test_a_plan_that_is_not(verify, served, engine_dir: Path, tmp_path: Path) -> None:
    promised = planned(engine_dir, tmp_path / "engine", FAST, 200_000, max_batch_size=64, max_seq_len=300_000)
    found = verify(*served, *PARTS, "--engine", promised)
    assert found.code == 1
    assert found.named("wrong") == {"batch", "context", "KV cache", "one stream", "operating point"}
    assert found.detail("batch").startswith("8 requests in a batch, but the plan has 64")
    assert "but the plan has 200,000" in found.detail("KV cache")
    suspects = found.detail("operating point").partition("First suspects: ")[2]
    assert "the batch limit is 8, but the plan has 40 requests in flight" in suspects
    assert "the KV cache holds 32,768 tokens of the planned 200,000 (KV fraction)" in suspects


def test_step_times_that_plan_can_read(verify, served, engine_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    found = verify(*served, "--only", "speed", "--engine", engine_dir, "--calibrate", file)
    measured = MeasuredSteps.load(file)
    assert found.code == 0
    assert (measured.target, measured.architecture) == ("openvino", "LlamaForCausalLM")
    assert [step.tokens for step in measured.of_phase("prefill")] == [64, 256, 1024, 4096]
    decode = measured.of_phase("decode")
    assert {step.batch_size for step in decode} == {1, 2, 4, 8}
    assert all(step.tokens == step.batch_size for step in decode)
    # a beat of the mock engine; nothing can be faster
    assert all(step.seconds > 0.003 for step in decode)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--triton", "127.0.0.1:1"], 1, "No Triton answers at 127.0.0.1:1; start one with `llmops serve`"),
        (["--url", "http://127.0.0.1:1"], 1, "Nothing answers at http://127.0.0.1:1/v1; start one"),
        (["--triton", "a:1", "--url", "http://b"], 2, "--triton and --url exclude each other"),
        (["--triton", "a:1", "--only", "gateway"], 2, "--only gateway cannot be checked through Triton"),
        (["--url", "http://b", "--calibrate", "host.json"], 2, "--calibrate measures an engine"),
        (["--url", "http://b", "--textfile", "."], 2, "--textfile needs the part `answers`"),
        (["--triton", "a:1", "--html", "/nowhere/r.html"], 2, "/nowhere/r.html cannot be written (No such"),
    ],
)
def test_nothing_to_look_at(arguments: list[str], code: int, sentence: str) -> None:
    done = run("verify", *arguments)
    assert done.returncode == code
    assert done.stderr.startswith(f"Error: {sentence}")
    assert len(done.stderr.splitlines()) == 1


def test_a_model_that_is_not_there(served) -> None:
    done = run("verify", *served, "--model", "other")
    assert done.returncode == 2
    assert "has no model other-tensorrt_llm ready" in done.stderr
