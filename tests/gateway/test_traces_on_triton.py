"""Traces of requests to the real Triton, with its own spans where it has any."""

import pytest

from llmops.gateway.settings import GatewaySettings
from tests.support.gateway_stack import serving
from tests.support.mock_engine.repository import make_mock_engine
from tests.support.otlp_receiver import covered, receiving
from tests.support.stack import ready_triton
from tests.support.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("stack")]

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 20, "stream": True}


@pytest.fixture(scope="module")
def receiver():
    with receiving() as one:
        yield one


@pytest.fixture(scope="module")
def telling_triton(engine_dir, receiver, tmp_path_factory):
    """Start a Triton with a gRPC stream for each request, as NVIDIA's C++ backend has it."""
    repository = make_mock_engine(engine_dir, tmp_path_factory.mktemp("mock") / "r", 0.01, transports=["request"])
    with ready_triton(repository, traces=f"{receiver.url}/v1/traces") as server:
        yield server


async def arrived(receiver, *names):
    """Wait for spans of these names: Triton sends those of one request apart."""
    await eventually(lambda: {*names} <= {span.name for span in list(receiver.spans)})


def traced(triton, receiver):
    traces = {"endpoint": receiver.url, "ratio": 0.0}
    return serving(GatewaySettings(triton=triton.grpc_address, refresh="0.5s", traces=traces))


async def test_a_trace_goes_through_gateway_and_triton(telling_triton, receiver):
    receiver.spans.clear()
    async with traced(telling_triton, receiver) as (client, _):
        for flags in ("00", "01"):
            headers = {"traceparent": f"00-{TRACE}-{SPAN}-{flags}"}
            answer = await client.post("/v1/chat/completions", json={**CHAT, "model": "mock"}, headers=headers)
            assert answer.text.endswith("data: [DONE]\n\n")
        ours = "POST /v1/chat/completions", "chat mock"
        await arrived(receiver, *ours, "InferRequest", "compute", "mock-tensorrt_llm")
    assert {span.trace for span in receiver.spans} == {TRACE}
    ours = {span.name: span for span in receiver.spans if span.service == "llmops-gateway"}
    root, call = ours["POST /v1/chat/completions"], ours["chat mock"]
    assert root.parent == SPAN
    assert covered(root, list(ours.values())) >= 0.95
    assert call.attributes["gen_ai.usage.output_tokens"] == 20
    # Triton's: of the one request that was chosen, below the span of the engine's work
    theirs = [span for span in receiver.spans if span.service != "llmops-gateway"]
    assert sorted(span.name for span in theirs) == ["InferRequest", "compute", "mock-tensorrt_llm"]
    request, compute, model = sorted(theirs, key=lambda span: span.name)
    assert (request.parent, model.parent, compute.parent) == (call.id, request.id, model.id)
    assert model.attributes["triton.model_name"] == "mock-tensorrt_llm"


async def test_a_step_streams_trace_says_what_the_engine_said(triton, receiver):
    receiver.spans.clear()
    async with traced(triton, receiver) as (client, _):
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
        answer = await client.post("/v1/chat/completions", json={**CHAT, "model": "smollm2"}, headers=headers)
        assert answer.status_code == 200
        await arrived(receiver, "POST /v1/chat/completions", "chat smollm2", "prefill")
    ours = {span.name: span for span in receiver.spans}
    root, call = ours["POST /v1/chat/completions"], ours["chat smollm2"]
    assert covered(root, list(ours.values())) >= 0.95
    assert call.attributes["gen_ai.usage.input_tokens"] > 0
    assert {span.service for span in receiver.spans} == {"llmops-gateway"}
