"""Tests of the errors that clients get for an engine's messages."""

from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from tritonclient.grpc import service_pb2

from llmops.gateway.errors import DrainingError, EngineError, UnavailableError, UnsupportedError
from llmops.gateway.triton.request_stream import RequestStream
from llmops.gateway.triton.response_reader import ResponseReader, error_from_message

EXECUTOR = "Executor failed process requestId 4 due to the following error: Encountered an error"


@pytest.mark.parametrize(
    ("said", "kind", "status"),
    [
        ("drain: the engine is shutting down and takes no new requests", DrainingError, 503),
        ("Request for unknown model: 'tiny-tensorrt_llm' is not found", UnavailableError, 503),
        ("unavailable for new grammars: 256 new grammars are already waiting; retry later", UnavailableError, 503),
        ("embedding_bias: not supported by target openvino", UnsupportedError, 400),
        ("the engine failed: out of memory", EngineError, 500),
        # 1.2.1 cpp/tensorrt_llm/executor/executorImpl.cpp (fetchNewRequests, forwardAsync), as
        # triton_backend/inflight_batcher_llm/src/model_instance_state.cc (fillTritonResponse) sends them
        (
            f"{EXECUTOR} when fetching new request: Prompt length (9000) exceeds maximum input length (8192).",
            UnsupportedError,
            400,
        ),
        (f"{EXECUTOR} in forwardAsync function: out of memory", EngineError, 500),
        ("no_such_tensor: whatever", EngineError, 500),
    ],
)
def test_the_status_of_an_engine_s_error(said, kind, status):
    error = error_from_message(said)
    assert (type(error), error.status) == (kind, status)


@pytest.mark.parametrize("said", ["queue: 256 requests wait", "Exceeds maximum queue size"])
def test_a_full_queue_behind_the_gateway_is_503_to_be_tried_again(said):
    error = error_from_message(said)
    assert (error.status, error.code, error.should_retry) == (503, "overloaded", True)
    assert ("retry-after" in error.headers(), said in error.message) == (True, False)


@pytest.mark.parametrize(("guided", "kind"), [(True, UnsupportedError), (False, EngineError)])
async def test_a_grammar_that_ended_a_step_is_blamed_on_requests_with_one(guided, kind):
    """NVIDIA's executor compiles grammars within a step (1.2.1 batch_manager/guidedDecoder.cpp, build), and an error of
    a step ends all requests (executor/executorImpl.cpp, forwardAsync and terminateActiveRequests).
    """
    said = (
        f"{EXECUTOR} in forwardAsync function: [20:00:00] /src/xgrammar-src/cpp/grammar_parser.cc:77: EBNF parser error"
    )
    answers = [service_pb2.ModelStreamInferResponse(error_message=said)]
    call = SimpleNamespace(read=AsyncMock(side_effect=answers), cancel=lambda: None)
    with pytest.raises(kind):
        await anext(RequestStream(call, ResponseReader(logprobs=False), guided))
