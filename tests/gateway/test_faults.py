"""Tests of what clients see when things break.

The engine's slots must be free afterwards.
"""

import asyncio
import json
import time
from types import SimpleNamespace

import httpx
import pytest

from llmops.gateway.app import create_app
from llmops.gateway.generation import answer
from llmops.gateway.settings import GatewaySettings, Timeouts
from llmops.gateway.telemetry import metrics
from llmops.gateway.telemetry.event_loop_lag import PROCESS_STALL_THRESHOLD
from tests.support.gateway_stack import CHAT, END, app_client, running, text_of
from tests.support.scripted_triton import Step
from tests.support.virtual_time import run_in_virtual_time
from tests.support.waiting import eventually, stop_tasks


async def endless(tensors):
    while True:
        yield Step((5,), wait=0.005)


async def test_an_engine_error_before_the_first_token_is_no_200(stack):
    stack.steps(Step(error="out of KV blocks", final=True))
    for streaming in (False, True):
        response = await stack.chat(stream=streaming)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")
        request = response.headers["x-request-id"]
        # The log has one line of a kind of error per second.
        claim = "" if streaming else f" The gateway's log has request {request}."
        assert response.json()["error"]["message"] == f"The engine failed on this request; send it again.{claim}"


async def test_an_answer_that_breaks_off_is_a_data_object_and_no_done(stack):
    for end, status, code in [
        (Step(error="CUDA error", final=True), 500, "engine_error"),
        (Step(), 500, "engine_error"),  # no final response
        (Step(drop=True), 503, "engine_unavailable"),
    ]:
        stack.say("Hello", end)
        events = await stack.events()
        assert (text_of(events), events[-1]["error"]["code"], "[DONE]" in events) == ("Hello", code, False)
        assert (await stack.chat()).status_code == status


async def test_an_engine_that_hangs_ends_at_the_timeouts(card, tokenizer):
    async with running(card, tokenizer, timeouts={"first_token": "0.3s"}) as stack:
        stack.steps(Step(hang=True))
        response = await stack.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (504, "engine_timeout")
        await stack.idle()
    async with running(card, tokenizer, timeouts={"idle": "0.2s"}) as stack:
        stack.steps(Step(tuple(tokenizer.encode("Hello"))), Step(hang=True))
        assert (await stack.events())[-1]["error"]["code"] == "engine_timeout"
        await stack.idle()


def test_a_slow_but_steady_stream_ends_once_its_last_message_is_too_long_ago(monkeypatch):
    async def main() -> None:
        for module in (answer, metrics):
            monkeypatch.setattr(module, "perf_counter", asyncio.get_running_loop().time)
        stream = SimpleNamespace(is_failing_over=False, cancel=lambda: None)
        meter = metrics.AnswerMeter(metrics.GatewayMetrics().model("tiny"), 0.0)
        watchdog = answer.StreamWatchdog(stream, meter, Timeouts(idle="2s"))
        for _ in range(9):
            await asyncio.sleep(1.9)
            meter.tokens(1)
        await asyncio.sleep(1.9)
        assert watchdog.expired is None
        await asyncio.sleep(0.2)
        assert watchdog.expired

    run_in_virtual_time(main())


async def test_a_gateway_that_stood_still_ends_no_stream_for_it(card, tokenizer):
    async with running(card, tokenizer, timeouts={"idle": "0.3s"}) as stack:
        ids = tokenizer.encode("Hello world!")
        stack.steps(Step((ids[0],)), *(Step((one,), wait=0.05) for one in ids[1:]), Step((END,)), Step(final=True))
        events = []
        async with stack.client.stream("POST", CHAT, json={**stack.chat_body, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line[6:]))
                    if len(events) == 3:
                        time.sleep(PROCESS_STALL_THRESHOLD + 0.5)  # in the event loop of all: nothing moves meanwhile
        assert (text_of(events), "error" in events[-1]) == ("Hello world!", False)


@pytest.mark.parametrize("streaming", [True, False])
async def test_clients_that_leave_free_their_slots_at_once(stack, streaming):
    stack.triton.script = endless
    body = {**stack.chat_body, "stream": streaming}
    async with httpx.AsyncClient(base_url=stack.client.base_url, timeout=30) as leaving:
        tasks = [asyncio.create_task(_consume(leaving, body)) for _ in range(30)]
        staying = [asyncio.create_task(_consume(stack.client, body)) for _ in range(2)]
        await eventually(lambda: stack.triton.active == 32)
        await stop_tasks(*tasks)
    await eventually(lambda: stack.triton.active == 2)
    await stop_tasks(*staying)
    await stack.idle()
    metrics = (await stack.client.get("/metrics")).text
    assert 'llmops_cancelled_requests_total{model="tiny"} 32.0' in metrics
    assert 'llmops_active_streams{model="tiny"} 0.0' in metrics


async def _consume(client: httpx.AsyncClient, body: dict) -> None:
    async with client.stream("POST", CHAT, json=body) as response:
        async for _ in response.aiter_raw():
            pass


async def test_triton_down_is_503_and_comes_back_without_a_restart(stack):
    stack.say("Hello")
    assert (await stack.chat()).status_code == 200
    await stack.triton.stop()
    response = await stack.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
    assert int(response.headers["retry-after"]) >= 1
    assert int(response.headers["retry-after-ms"]) >= 1000
    assert response.headers["x-should-retry"] == "true"
    ready = await stack.client.get("/health/ready")
    assert (ready.status_code, ready.json()["error"]["code"]) == (503, "not_ready")
    assert (await stack.client.get("/health/live")).status_code == 200
    await stack.triton.start()

    async def answers() -> bool:
        return (await stack.chat()).status_code == 200

    await eventually(answers)
    assert (await stack.chat()).json()["choices"][0]["message"]["content"] == "Hello"


async def test_a_triton_that_was_never_there_is_503_and_not_404(card, tokenizer):
    async with running(card, tokenizer) as stack:
        await stack.triton.stop()
        async with app_client(create_app(GatewaySettings(triton=stack.triton.address))) as client:
            assert (await client.post(CHAT, json=stack.chat_body)).status_code == 503
            assert (await client.get("/v1/models")).json()["data"] == []


async def test_shutdown_lets_open_streams_end(card, tokenizer):
    async with running(card, tokenizer) as stack:
        stack.say("Hello world! How are you?", wait=0.03)
        streaming = asyncio.create_task(stack.events())
        await eventually(lambda: stack.triton.active == 1)
        stack.server.should_exit = True
        events = await streaming
        assert (events[-1], text_of(events)) == ("[DONE]", "Hello world! How are you?")


async def test_an_engine_that_has_ended_makes_the_gateway_unready(stack):
    """Triton goes on listing its model as loaded; asked itself, the model says that it is not ready."""
    stack.triton.engine_ready = False
    response = await stack.client.get("/health/ready")
    assert (response.status_code, "is not ready" in response.json()["error"]["message"]) == (503, True)
    stack.steps(Step(error="engine: it has ended and takes no requests (worker 0 exited)", final=True))
    assert (await stack.chat()).status_code == 503
    stack.triton.engine_ready = True
    assert (await stack.client.get("/health/ready")).status_code == 200
