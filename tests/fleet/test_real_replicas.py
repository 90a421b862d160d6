"""One gateway in front of real Tritons: whatever happens to one of them, the model is there."""

import asyncio
import functools
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmops.gateway.settings import GatewaySettings
from tests.steps.test_drain import Serve
from tests.support import gateway_stack
from tests.support.gateway_stack import replica_lines, serving
from tests.support.mock_engine.planned import constant
from tests.support.mock_engine.repository import make_mock_engine
from tests.support.processes import descendants
from tests.support.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("own-triton")]

STEP = 0.01


@pytest.fixture(scope="module")
def mock(engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository of an engine with a KV cache that makes a hundred tokens a second."""
    return make_mock_engine(engine_dir, tmp_path_factory.mktemp("mock") / "repository", paged=constant(STEP, 0, 2048))


@contextmanager
def served(repository: Path, folder: Path, count: int) -> Iterator[list[Serve]]:
    """Start `llmops serve` so many times, and end all of them, also those that a test has stopped."""
    started: list[Serve] = []
    for _ in range(count):
        started.append(Serve(repository, Path(tempfile.mkdtemp(dir=folder)), 60))
    yield started
    for one in started:
        tell(one, signal.SIGCONT)
        tell(one, signal.SIGKILL)
        one.process.wait()


def tell(one: Serve, number: signal.Signals) -> None:
    """Send a signal to the server and all processes that it runs.

    Child processes resume before the server does: Triton gives up a model for good if its process
    is silent when Triton's own wait for it is over, and that was over while both were stopped.
    """
    pids = descendants(one.process.pid)
    for pid in reversed(pids) if number == signal.SIGCONT else pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


become = functools.partial(gateway_stack.become, model="mock")


async def model(client: httpx.AsyncClient) -> dict[str, Any]:
    return (await client.get("/v1/models/mock")).json()


async def say(client: httpx.AsyncClient, prompt: str = "Once upon a time", tokens: int = 8) -> httpx.Response:
    body = {"model": "mock", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    return await client.post("/v1/completions", json=body)


async def answering(client: httpx.AsyncClient, count: int, where: set[str]) -> list[asyncio.Task[httpx.Response]]:
    """Start `count` answers of 300 tokens and wait until their engines have begun them.

    Each of the places in `where` has some of the answers.
    """
    tasks = [asyncio.create_task(say(client, tokens=300)) for _ in range(count)]

    async def begun() -> bool:
        busy = [one for one in await replica_lines(client, "mock") if one["state"] == "ready" and one["own"]]
        sent = sum(one["own"] for one in busy) + sum(task.done() for task in tasks)
        return sent == count and {one["replica"] for one in busy} >= where and not any(one["waiting"] for one in busy)

    async def begun_or_over() -> bool:
        return await begun() or all(task.done() for task in tasks)

    await eventually(begun_or_over)
    # on a busy machine they can end before they were seen to run
    return await answering(client, count, where) if all(task.done() for task in tasks) else tasks


async def texts(tasks: list[asyncio.Task[httpx.Response]]) -> set[str]:
    answers = await asyncio.gather(*tasks)
    assert {one.status_code for one in answers} == {200}, [one.text for one in answers]
    return {one.json()["choices"][0]["text"] for one in answers}


@pytest.fixture
def two(mock: Path, tmp_path: Path) -> Iterator[list[Serve]]:
    with served(mock, tmp_path, 2) as started:
        yield started


async def test_two_are_one_model_and_each_fault_leaves_it_there(two) -> None:
    first, second = two
    a, b = first.address, second.address
    async with serving(GatewaySettings(replicas=[a, b, "127.0.0.1:9"], refresh="0.5s")) as (client, _):
        await become(client, "ready", "ready")
        found = await model(client)
        assert found["ready"]
        assert found["replicas"] == {"ready": 2, "total": 2, "measured": 0}
        assert (found["capacity"]["sequences"], found["capacity"]["kv_tokens"]) == (512, 2 * 2048 * 32)

        answers = await asyncio.gather(*(say(client, tokens=60) for _ in range(16)))
        assert {one.status_code for one in answers} == {200}
        assert len({one.json()["choices"][0]["text"] for one in answers}) == 1

        whole = (await say(client, tokens=300)).json()["choices"][0]["text"]

        # one that hangs
        running = await answering(client, 8, {a, b})
        tell(first, signal.SIGSTOP)
        assert await texts(running) == {whole}
        await become(client, "gone", "ready")
        assert (await model(client))["replicas"] == {"ready": 1, "total": 2, "measured": 0}
        tell(first, signal.SIGCONT)
        await become(client, "ready", "ready")

        # one that is killed
        running = await answering(client, 16, {a, b})
        tell(second, signal.SIGKILL)
        assert await texts(running) == {whole}
        await become(client, "ready", "gone")

        # the last one is asked to end, and finishes what it has
        running = await answering(client, 8, {a})
        first.ask()
        assert await texts(running) == {whole}
        await become(client, "gone", "gone")
        refused = await say(client)
        said = "No replica of the model mock can take the request now (2 gone); send it again."
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, said)
        assert not (await model(client))["ready"]
