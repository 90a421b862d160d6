"""Engines that answer every request and are broken all the same: `verify` must name the fault.

The engines are scripted, as no real one has these faults any longer. tests/trtllm/faults.py makes
each check blind again, and a test here must notice.
"""

import asyncio
import struct
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from llmops.gateway.interfaces import Capabilities
from llmops.perf.verify.contract import kv_cache_reports, outputs, sampling
from llmops.perf.verify.engine_context import EngineContext
from llmops.perf.verify.findings import Finding, VerifyCheck, WrongError
from tests.verify.test_other_backends import desk, response


def _given(request: service_pb2.ModelInferRequest, name: str, kind: str) -> list[Any] | None:
    inputs = dict(zip((one.name for one in request.inputs), request.raw_input_contents, strict=True))
    raw = inputs.get(name)
    return None if raw is None else list(struct.unpack(f"<{len(raw) // 4}{kind}", raw))


def _tokens(request: service_pb2.ModelInferRequest, count: int, score: float) -> list[Any]:
    return [response(0, [100 + at], [score]) for at in range(count)]


def _greedy(request: service_pb2.ModelInferRequest) -> list[Any]:
    """Answer as NVIDIA's C++ backend does when every draw is greedy: the score is that of the one candidate."""
    (new,) = _given(request, "request_output_len", "i") or [0]
    return _tokens(request, new, -1.5)


def _run(checks: list[VerifyCheck], name: str, engine: EngineContext) -> Finding:
    (check,) = [one for one in checks if one.name == name]
    return asyncio.run(check.run(engine))


def _scored(answer: Any) -> EngineContext:
    engine = desk(answer)
    engine.metadata.capabilities = Capabilities(n=1, seed=True, logprobs=True)
    engine.metadata.vocab_size = 512
    return engine


def test_scores_that_are_zero_are_no_fault_of_a_greedy_answer() -> None:
    """The C++ backend normalises the scores of one candidate to 0 for engines that ask for it."""
    healthy = _scored(lambda request: _tokens(request, (_given(request, "request_output_len", "i") or [0])[0], 0.0))
    healthy.probe.inputs["return_log_probs"] = "BOOL"
    assert _run(outputs.CHECKS, "log-probabilities", healthy).verdict == "works"


def test_an_engine_that_never_draws() -> None:
    engine = _scored(_greedy)
    engine.probe.inputs.update(dict.fromkeys(("temperature", "runtime_top_p"), "FP32"), seed="UINT64")
    with pytest.raises(WrongError, match="ignores the temperature"):
        _run(sampling.CHECKS, "drawing", engine)


class FrozenGauges:
    """Gauges whose reader has stopped."""

    async def read(self) -> dict[tuple[str, str], float]:
        return {("nv_trt_llm_kv_cache_block_metrics", "used"): 7.0}


def test_gauges_that_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_reports, "_PATIENCE", 0.2)
    engine = _scored(_greedy)
    engine.metadata.max_seq_len = 4096
    engine.gauges = FrozenGauges()  # type: ignore[assignment]
    with pytest.raises(WrongError, match="reader of statistics has stopped"):
        _run(kv_cache_reports.CHECKS, "KV gauges", engine)
