"""`kill -9` of a gateway, and of one of its workers, in the middle of answers: the next one bills what they had."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from llmops.store.factory import open_store
from llmops.store.tables import usage_records
from tests.support.scripted_triton import ScriptedTriton, Step
from tests.support.waiting import GENEROUS, eventually

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "stream": True}


class Gateway:
    """`llmops gateway` as a process, with a store and an outbox of the test's own."""

    def __init__(self, folder: Path, triton: int, workers: int) -> None:
        self.folder, self.url = folder, f"sqlite:///{folder}/store.db"
        command = [sys.executable, "-m", "llmops.cli", "gateway", "--triton", f"127.0.0.1:{triton}", "--port", "0"]
        command += ["--store", self.url, "--open", "--workers", str(workers)]
        self.log = folder / "gateway.log"
        # several workers need a Redis; that this one is away says nothing about usage
        env = {**os.environ, "LLMOPS_USAGE__OUTBOX": str(folder / "usage"), "LLMOPS_REDIS": "redis://127.0.0.1:1"}
        with self.log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=env)

    async def ready(self) -> httpx.AsyncClient:
        await eventually(lambda: re.search(r"listens on (http://\S+)", self.log.read_text()))
        url = re.search(r"listens on (http://\S+) ", self.log.read_text())[1]
        client = httpx.AsyncClient(base_url=url, timeout=GENEROUS)

        async def is_ready() -> bool:
            try:
                return (await client.get("/health/ready")).status_code == 200
            except httpx.TransportError:
                return False

        await eventually(is_ready)
        return client

    async def rows(self):
        async with await open_store(self.url) as store, store.read() as connection:
            return (await connection.execute(select(usage_records))).mappings().all()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def workers(self) -> set[int]:
        pid = self.process.pid
        return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


@pytest.fixture
async def triton(card):
    one = ScriptedTriton(card, lambda tensors: [*[Step((9,))] * 5, Step(hang=True)])
    await one.start()
    yield one
    await one.stop()


@asynccontextmanager
async def streaming(client: httpx.AsyncClient):
    """A stream of which five tokens have come, and no more will."""
    async with client.stream("POST", "/v1/chat/completions", json=BODY) as response:
        lines = response.aiter_lines()
        seen = 0
        while seen < 5:
            seen += '"content":"' in await anext(lines) and 1
        yield response


@pytest.mark.parametrize("workers", [1, 2])
async def test_killed_in_the_middle_of_answers(triton, tmp_path, workers):
    gateway = Gateway(tmp_path, triton.port, workers)
    client = await gateway.ready()
    try:
        async with streaming(client), streaming(client), streaming(client):
            if workers == 1:
                gateway.kill()
            else:
                # both of them; their supervisor starts others
                before = gateway.workers()
                for pid in before:
                    os.kill(pid, signal.SIGKILL)
                await eventually(lambda: len(gateway.workers() - before) == workers)
        if workers == 1:
            gateway = Gateway(tmp_path, triton.port, workers)

        while len(await gateway.rows()) < 3:
            await asyncio.sleep(0.2)
        for row in await gateway.rows():
            assert (row["status"], row["finish_reason"]) == (0, "gateway_lost")
            # the role's event has no token; whatever was written had been counted before
            assert 4 <= row["output_tokens"] <= 5
    finally:
        await client.aclose()
        gateway.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(gateway.process.wait)
    assert len(await gateway.rows()) == 3
