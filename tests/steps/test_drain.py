"""A stop on the real Triton: answers that run come to their end, for at most the exit timeout."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.steps.test_faults import begun
from tests.support.live_process import LLMOPS, LiveProcess
from tests.support.mock_engine.repository import make_mock_engine
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import stop_tasks

pytestmark = pytest.mark.xdist_group("stack")


class Serve(LiveProcess):
    """`llmops serve` as its own process, ready."""

    def __init__(self, repository: Path, folder: Path, exit_timeout: int, *more: str) -> None:
        ports = ["--grpc-port", "0", "--metrics-port", "0", "--exit-timeout", f"{exit_timeout}s"]
        super().__init__([*LLMOPS, "serve", str(repository), *ports, *more], folder / "serve.log")
        self.address = self.found(r"^Ready\. gRPC (\S+),")

    def ask(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    async def ended(self, seconds: float) -> int:
        return await asyncio.to_thread(self.process.wait, seconds)


@pytest.fixture
def start_serve(tmp_path: Path) -> Iterator:
    started: list[Serve] = []

    def start(repository: Path, exit_timeout: int, *more: str) -> Serve:
        started.append(Serve(repository, tmp_path, exit_timeout, *more))
        return started[-1]

    yield start
    for serve in started:
        serve.kill()


@pytest.fixture
def mock_engine(engine_dir: Path, tmp_path: Path) -> Path:
    """A repository whose model gives every stream a token each 5 milliseconds, whatever else the machine does."""
    return make_mock_engine(engine_dir, tmp_path / "mock", 0.005)


async def begin(url: str, count: int, tokens: int) -> list[asyncio.Task]:
    """Start `count` answers and wait for the first text of each."""
    return await begun(url, tokens, count, "mock")


async def finish(answers: list[asyncio.Task]) -> tuple[set[str], set[int | None], set[str | None]]:
    """Return the texts of all answers, the tokens that their ends count, and the messages of their errors."""
    found = await asyncio.gather(*answers)
    errors = {next((one["error"]["message"] for one in events if "error" in one), None) for _, events in found}
    counts = {(events[-1].get("usage") or {}).get("completion_tokens") for _, events in found}
    return {text for text, _ in found}, counts, errors


async def test_answers_longer_than_the_window_too_and_nothing_new_is_begun(mock_engine, start_serve, start_gateway):
    """800 steps; a window holds 256. The connection breaks on the way. test_up.py stops the real model."""
    serve = await asyncio.to_thread(start_serve, mock_engine, 300)
    async with TcpProxy(serve.address) as proxy:
        gateway = await asyncio.to_thread(start_gateway, proxy.address)
        answers = await begin(gateway.url, 4, 800)
        serve.ask()
        await refused(gateway.url)
        proxy.cut()
        texts, tokens, errors = await finish(answers)
    assert (len(texts), tokens, errors) == (1, {800}, {None})
    assert await serve.ended(120) == 0


async def test_a_gpu_error_in_the_kernel_log_drains_for_good(mock_engine, start_serve, start_gateway, tmp_path):
    log = tmp_path / "kern.log"
    log.write_text("[ 1.0] NVRM: Xid (PCI:0000:3b:00): 79, an old one\n")
    more = ("--gpu-faults", str(log), "--restarts", "3")
    serve = await asyncio.to_thread(start_serve, mock_engine, 300, *more)
    gateway = await asyncio.to_thread(start_gateway, serve.address)
    answers = await begin(gateway.url, 4, 2000)
    with log.open("a") as file:
        file.write("[ 9.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=7, a fault of a program\n")
        file.write("[ 9.1] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>\n")
    await refused(gateway.url)
    assert (await finish(answers))[1:] == ({2000}, {None})
    assert await serve.ended(120) == 1
    assert "Xid 79 on GPU 0000:3b:00 (GPU has fallen off the bus). The server drains" in serve.log
    assert "Starting it again" not in serve.log


async def refused(url: str) -> None:
    """Until a new request is answered with 503, that it may be tried again."""
    short = {"model": "mock", "prompt": "Once", "max_tokens": 1}
    async with httpx.AsyncClient(timeout=120) as client:
        while (reply := await client.post(url + "/v1/completions", json=short)).status_code == 200:
            await asyncio.sleep(0.02)
    assert reply.status_code == 503
    assert reply.json()["error"]["message"] == "The engine is shutting down; send the request again."
    assert int(reply.headers["retry-after"]) > 0


async def test_at_the_exit_timeout_what_still_runs_is_told_and_all_ends(mock_engine, start_serve, start_gateway):
    serve = await asyncio.to_thread(start_serve, mock_engine, 2)
    gateway = await asyncio.to_thread(start_gateway, serve.address)
    async with httpx.AsyncClient(timeout=300) as client:
        long = {"model": "mock", "prompt": "Once upon a time", "max_tokens": 200_000, "ignore_eos": True}
        whole = asyncio.create_task(client.post(gateway.url + "/v1/completions", json=long))
        answers = await begin(gateway.url, 4, 200_000)
        serve.ask()
        reason = "The engine is shutting down; send the request again."
        assert (await finish(answers))[2] == {reason}
        reply = await whole
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, reason)
    assert int(reply.headers["retry-after"]) > 0
    assert await serve.ended(120) == 0


async def test_a_second_signal_ends_at_once(mock_engine, start_serve, start_gateway) -> None:
    serve = await asyncio.to_thread(start_serve, mock_engine, 10_000)
    gateway = await asyncio.to_thread(start_gateway, serve.address)
    answers = await begin(gateway.url, 2, 200_000)
    serve.ask()
    await refused(gateway.url)
    serve.ask()
    assert await serve.ended(120) == 130
    assert all((await finish(answers))[2])
    assert not list(Path("/dev/shm").glob(f"*llmops_{serve.process.pid}_*"))


async def test_a_gateway_that_leaves_does_not_hold_up_the_stop(mock_engine, start_serve, start_gateway) -> None:
    """Its requests leave the batch with it: the exit timeout of hours is not waited for."""
    serve = await asyncio.to_thread(start_serve, mock_engine, 10_000)
    gateway = await asyncio.to_thread(start_gateway, serve.address, LLMOPS_TIMEOUTS__DRAIN="0")
    answers = await begin(gateway.url, 2, 200_000)
    gateway.process.terminate()
    serve.ask()
    assert await serve.ended(120) == 0
    await stop_tasks(*answers)
