"""Step streams on the real Triton, with real faults: killed, stopped and cut-off gateways."""

import asyncio
import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable

import httpx
import pytest

from llmops.model_repository.launch import Ports, start_triton
from tests.support.mock_engine.repository import make_mock_engine
from tests.support.stack import wait_ready
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import GENEROUS, eventually

pytestmark = pytest.mark.xdist_group("stack")


def body(tokens: int, model: str = "paced") -> dict:
    asked = {"model": model, "prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {**asked, "stream": True, "stream_options": {"include_usage": True}}


async def stream(
    url: str, tokens: int, started: asyncio.Event | None = None, model: str = "paced"
) -> tuple[str, list[dict]]:
    """The text of one streamed completion, and all of its data objects."""
    text, events = "", []
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", url + "/v1/completions", json=body(tokens, model)) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                text += "".join(choice["text"] for choice in events[-1].get("choices", []))
                if started is not None and text:
                    started.set()
    return text, events


def active(metrics_url: str) -> int:
    """Requests in the engine's batch, by NVIDIA's metric."""
    text = urllib.request.urlopen(metrics_url, timeout=120).read().decode()
    found = re.findall(r'nv_trt_llm_request_metrics\{[^}]*"active"[^}]*\} ([\d.e+]+)', text)
    return sum(int(float(value)) for value in found)


async def until(wanted: float, read: Callable[..., float], *arguments: str) -> None:
    """Wait until `read` returns `wanted`."""

    async def is_there() -> bool:
        return await asyncio.to_thread(read, *arguments) == wanted

    await eventually(is_there, f"{read.__name__}{arguments} is {wanted}")


async def begun(url: str, tokens: int, count: int = 1, model: str = "paced") -> list[asyncio.Task]:
    """Return tasks of `stream`, each of which has text."""
    started = [asyncio.Event() for _ in range(count)]
    tasks = [asyncio.create_task(stream(url, tokens, event, model)) for event in started]
    await asyncio.gather(*(event.wait() for event in started))
    return tasks


async def test_a_killed_gateway_frees_its_slots_within_the_grace_time(mock_triton, start_gateway) -> None:
    gateway = start_gateway(mock_triton.grpc_address)
    tasks = await begun(gateway.url, 6000, 8)
    await until(8, active, mock_triton.metrics_url)
    gateway.process.kill()
    await until(0, active, mock_triton.metrics_url)
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, httpx.HTTPError)


async def test_a_cut_connection_goes_on_without_a_lost_or_doubled_token(mock_triton, start_gateway) -> None:
    async with TcpProxy(mock_triton.grpc_address) as proxy:
        gateway = await asyncio.to_thread(start_gateway, proxy.address)
        whole, _ = await stream(gateway.url, 60)
        tasks = await begun(gateway.url, 60, 4)
        for _ in range(3):
            await asyncio.sleep(0.3)
            proxy.cut()
        answers = await asyncio.gather(*tasks)
    assert proxy.cuts == 3
    for text, events in answers:
        assert text == whole
        assert events[-1]["usage"]["completion_tokens"] == 60


async def test_a_stopped_gateway_does_not_slow_another_and_then_goes_on(mock_triton, start_gateway) -> None:
    stopped, other = start_gateway(mock_triton.grpc_address), start_gateway(mock_triton.grpc_address)
    whole, _ = await stream(other.url, 40)
    (waiting,) = await begun(stopped.url, 40)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    text, _ = await asyncio.wait_for(stream(other.url, 40), GENEROUS)
    assert text == whole
    os.kill(stopped.process.pid, signal.SIGCONT)
    text, events = await waiting
    assert text == whole
    assert events[-1]["usage"]["completion_tokens"] == 40


async def test_a_restarted_triton_ends_streams_with_one_error(engine_dir, start_gateway, tmp_path) -> None:
    repository = make_mock_engine(engine_dir, tmp_path / "repository", names=["paced"])
    first = start_triton(repository, ports=Ports(0, 0, 0))
    try:
        await asyncio.to_thread(first.wait_ready, 120)
        gateway = await asyncio.to_thread(start_gateway, first.grpc_address)
        (task,) = await begun(gateway.url, 6000)
        os.killpg(first.process.pid, signal.SIGKILL)
    finally:
        first.stop()
    # the idle subscription is ended by the drain: without it this would be waited for
    second = await asyncio.to_thread(start_triton, repository, ports=Ports(0, first.ports.grpc, 0), exit_timeout=10_000)
    try:
        await asyncio.to_thread(second.wait_ready, 120)
        _, events = await task
        assert [event["error"]["code"] for event in events if "error" in event] == ["engine_unavailable"]
        await asyncio.to_thread(wait_ready, f"{gateway.url}/health/ready")
        text, _ = await stream(gateway.url, 10)
        assert text
    finally:
        await asyncio.to_thread(second.stop)
