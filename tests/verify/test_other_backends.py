"""Scripted backends: what NVIDIA's does otherwise than our engine model is no fault, and the fault of an engine that
answers every request and is broken all the same is named.
"""

import asyncio
import json
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from grpc import aio
from tritonclient.grpc import model_config_pb2, service_pb2

from llmops.build.trtllm.release_profiles import profiles_per_release
from llmops.gateway.interfaces import Capabilities
from llmops.gateway.telemetry.metric_definitions import ENGINE_BLOCKS
from llmops.perf.verify import capacity
from llmops.perf.verify.contract import guided, kv_cache_reports, outputs, sampling
from llmops.perf.verify.engine_context import EngineContext
from llmops.perf.verify.findings import Finding, VerifyCheck, WrongError
from llmops.perf.verify.probe import Probe
from llmops.perf.verify.speed import MeasuredSpeed, suspects

INPUTS = {
    "input_ids": "INT32", "input_lengths": "INT32", "request_output_len": "INT32", "streaming": "BOOL",
    "end_id": "INT32", "runtime_top_k": "INT32", "num_return_sequences": "INT32", "return_log_probs": "BOOL",
}  # fmt: skip


def response(sequence: int, ids: list[int], log_probs: list[float]) -> service_pb2.ModelStreamInferResponse:
    made = service_pb2.ModelStreamInferResponse()
    outputs = {
        "output_ids": ("INT32", "i", ids), "output_log_probs": ("FP32", "f", log_probs),
        "sequence_index": ("INT32", "i", [sequence]), "sequence_length": ("INT32", "i", [len(ids)]),
    }  # fmt: skip
    for name, (datatype, kind, values) in outputs.items():
        made.infer_response.outputs.add(name=name, datatype=datatype, shape=[1, len(values)])
        made.infer_response.raw_output_contents.append(struct.pack(f"<{len(values)}{kind}", *values))
    return made


def asked(request: service_pb2.ModelInferRequest, name: str = "request_output_len") -> int:
    """Return an INT32 input of a request, 1 where it has none."""
    inputs = dict(zip((one.name for one in request.inputs), request.raw_input_contents, strict=True))
    return struct.unpack("<i", inputs.get(name, b"\1\0\0\0"))[0]


def accumulating(request: service_pb2.ModelInferRequest) -> list[service_pb2.ModelStreamInferResponse]:
    """The new ids of a stream, the log-probabilities of all so far; each sequence that was asked for."""
    many, scores = asked(request, "num_return_sequences"), [-0.5 - at for at in range(asked(request))]
    return [response(one, [100 + at], scores[: at + 1]) for at in range(len(scores)) for one in range(many)]


class Call:
    """One ModelStreamInfer call to a backend that answers with `answer(request)`."""

    def __init__(self, answer: Callable[[Any], list[Any]]) -> None:
        self._answer, self._responses = answer, []

    async def write(self, message: service_pb2.ModelInferRequest) -> None:
        self._responses = [*self._answer(message), aio.EOF]

    async def done_writing(self) -> None: ...

    async def read(self) -> Any:
        return self._responses.pop(0)

    def cancel(self) -> None: ...


def desk(answer: Callable[[Any], list[Any]], **parameters: str) -> EngineContext:
    """Return the context of a model without `subscription` whose metadata has `n: 1`.

    Such a model is not one of ours.
    """
    config = model_config_pb2.ModelConfig()
    for name, datatype in INPUTS.items():
        config.input.add(name=name, data_type=model_config_pb2.DataType.Value(f"TYPE_{datatype}"))
    for name, value in parameters.items():
        config.parameters[name].string_value = value
    client: Any = SimpleNamespace(start_call=lambda: Call(answer))
    metadata: Any = SimpleNamespace(capabilities=Capabilities(n=1, seed=True), max_batch_size=8)
    plain = [100 + at for at in range(16)]
    manifest: Any = SimpleNamespace(plan={"chunked_prefill": True})
    return EngineContext(Probe(client, "m-tensorrt_llm", config), metadata, manifest, prompt=[1, 2, 3], plain=plain)


def test_log_probabilities_that_accumulate_over_a_stream() -> None:
    heard = asyncio.run(desk(accumulating).same(4, return_log_probs=True))
    assert (heard.ids, heard.scores) == ([100, 101, 102, 103], [-0.5, -1.5, -2.5, -3.5])


def run(checks: list[VerifyCheck], name: str, engine: Any) -> Finding:
    (check,) = [one for one in checks if one.name == name]
    return asyncio.run(check.run(engine))


def sequences(answer: Callable[[Any], list[Any]]) -> Finding:
    return run(sampling.CHECKS, "n sequences", desk(answer))


def test_sequences_that_are_honoured_though_not_announced() -> None:
    assert sequences(accumulating).verdict == "works"


def test_sequences_that_are_refused_in_other_words() -> None:
    refusal = service_pb2.ModelStreamInferResponse(error_message="[TensorRT-LLM][ERROR] not with this engine")
    assert sequences(lambda request: [refusal]).verdict == "refused"


def test_sequences_that_are_dropped() -> None:
    def dropped(request: service_pb2.ModelInferRequest) -> list[service_pb2.ModelStreamInferResponse]:
        return [one for one in accumulating(request) if one.infer_response.raw_output_contents[2] == b"\0\0\0\0"]

    with pytest.raises(WrongError, match="greedy sequence 1"):
        sequences(dropped)


def test_a_broken_grammar_is_not_sent_to_a_backend_that_ends_all_answers_over_it() -> None:
    """Its executor compiles guides within a step, without a try (1.2.1 cpp/tensorrt_llm/batch_manager/
    guidedDecoder.cpp, build); an error of a step ends all requests (executor/executorImpl.cpp,
    terminateActiveRequests).
    """
    sent: list[Any] = []
    engine = desk(lambda request: [sent.append(request)])
    engine.metadata.capabilities = Capabilities(guided=("regex",))
    assert run(guided.CHECKS, "guided: a guide that is not a grammar", engine).verdict == "unseen"
    assert not sent


def test_a_guided_answer_ends_at_every_end_token_of_the_model() -> None:
    """The executor compiles guides with all of them as stop tokens, and has no mask of tokens for an answer that goes
    on after one (batch_manager/guidedDecoder.cpp, build; xgrammar 0.1.25 cpp/grammar_matcher.cc: "GrammarMatcher has
    terminated after accepting the stop token").
    """
    sent: dict[str, Any] = {}

    async def same(new: int, **tensors: Any) -> SimpleNamespace:
        sent.update(tensors)
        return SimpleNamespace(ids=[])

    metadata = SimpleNamespace(capabilities=Capabilities(guided=("json",)), end_ids=(2, 3, 4))
    run(guided.CHECKS, "guided: json", SimpleNamespace(metadata=metadata, same=same, tokenizer=None))
    assert (sent["end_id"], sent["stop_words_list"]) == (2, [[3], [4]])


def llm_api(**arguments: bool) -> dict[str, str]:
    """Return what `llmops repo` writes for the LLM API: a profile for each of its release lines."""
    return {"llm_profiles": json.dumps([one.as_json() for one in profiles_per_release(arguments)])}


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"enable_chunked_context": "false"}, True),
        ({"enable_chunked_context": "true"}, False),
        (llm_api(enable_chunked_prefill=False), True),
        (llm_api(enable_chunked_prefill=True), False),
        ({}, False),
    ],
)
def test_chunked_prefill_among_the_suspects(parameters: dict[str, str], named: bool) -> None:
    found = asyncio.run(suspects(desk(accumulating, **parameters), 1, MeasuredSpeed(1.0, 1.0, 1.0, 1)))
    assert ("chunked prefill is off, but the plan uses it" in found) == named


@pytest.mark.parametrize(("blocks", "verdict"), [(128, "works"), (127, "wrong")])
def test_a_cache_that_holds_no_whole_sequence(blocks: int, verdict: str) -> None:
    """TensorRT-LLM logs "maxSequenceLen is reduced to maxAttentionWindow" (1.2.1 cpp/tensorrt_llm/batch_manager/
    trtGptModelInflightBatching.cpp, clampWindowSizesToFitAtLeastOneSequence), and loads the engine.
    """

    async def read() -> dict[tuple[str, str], float]:
        return {(ENGINE_BLOCKS, "max"): blocks, (ENGINE_BLOCKS, "tokens_per"): 32}

    gauges = SimpleNamespace(read=read)
    engine = SimpleNamespace(metadata=SimpleNamespace(max_seq_len=4096), gauges=gauges, manifest=None)
    assert run(capacity.CHECKS, "KV cache", engine).verdict == verdict


# -- Broken engines. No real one has these faults any longer


def scored(score: float) -> EngineContext:
    """An engine that gives each token this score: NVIDIA's C++ backend scores the one candidate of a greedy draw so."""
    engine = desk(lambda request: [response(0, [100 + at], [score]) for at in range(asked(request))])
    engine.metadata.capabilities = Capabilities(n=1, seed=True, logprobs=True)
    engine.metadata.vocab_size = 512
    return engine


def test_scores_that_are_zero_are_no_fault_of_a_greedy_answer() -> None:
    """The C++ backend normalises the scores of one candidate to 0 for engines that ask for it."""
    healthy = scored(0.0)
    healthy.probe.inputs["return_log_probs"] = "BOOL"
    assert run(outputs.CHECKS, "log-probabilities", healthy).verdict == "works"


def test_an_engine_that_never_draws() -> None:
    engine = scored(-1.5)
    engine.probe.inputs.update(dict.fromkeys(("temperature", "runtime_top_p"), "FP32"), seed="UINT64")
    with pytest.raises(WrongError, match="ignores the temperature"):
        run(sampling.CHECKS, "drawing", engine)


def test_gauges_that_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_reports, "_PATIENCE", 0.2)
    engine = scored(-1.5)
    engine.metadata.max_seq_len = 4096
    engine.gauges = AsyncMock(**{"read.return_value": {("nv_trt_llm_kv_cache_block_metrics", "used"): 7.0}})
    with pytest.raises(WrongError, match="reader of statistics has stopped"):
        run(kv_cache_reports.CHECKS, "KV gauges", engine)
