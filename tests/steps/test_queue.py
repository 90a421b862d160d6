"""More sequences than an engine's queue holds, through the gateway: refused at once, with when to come back."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from llmops.model_repository.launch import TritonServer
from tests.support.mock_engine.repository import make_mock_engine
from tests.support.stack import ready_triton
from tests.support.waiting import stop_tasks

pytestmark = pytest.mark.xdist_group("stack")


@pytest.fixture
def narrow(engine_dir: Path, tmp_path: Path) -> Iterator[TritonServer]:
    """A batch of 2, so that 8 may wait; and no answer comes to its end."""
    repository = make_mock_engine(engine_dir, tmp_path / "mock", 0.05, max_batch_size=2)
    with ready_triton(repository, exit_timeout=0) as server:
        yield server


async def test_what_does_not_fit_the_queue_gets_503_and_the_rest_stays(narrow, start_gateway) -> None:
    gateway = await asyncio.to_thread(start_gateway, narrow.grpc_address)
    body = {"model": "mock", "prompt": "Once", "max_tokens": 200_000, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as client:
        asked = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(16)]
        refused: list[httpx.Response] = []
        for first in asyncio.as_completed(asked):
            refused.append(await first)
            if len(refused) == 6:
                break
        assert {reply.status_code for reply in refused} == {503}
        assert {reply.json()["error"]["code"] for reply in refused} == {"overloaded"}
        assert all(int(reply.headers["retry-after"]) > 0 for reply in refused)
        assert sum(not task.done() for task in asked) == 10
        await stop_tasks(*asked)
