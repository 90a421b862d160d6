"""`llmops gateway --workers 2`: a response is the same one whichever worker a request reaches.

A stopped process (SIGSTOP) takes no connection, so a test can say which worker answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from scripted_triton import ScriptedTriton, Step

PATH = "/v1/responses"
eventually, GENEROUS = sys.modules["gateway_conftest"].eventually, sys.modules["gateway_conftest"].GENEROUS


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Crew:
    """A gateway of two workers; `only` stops all but one of them for a while."""

    def __init__(self, process: subprocess.Popen, url: str, triton: ScriptedTriton, tokenizer) -> None:
        self.process, self.url, self.triton, self.tokenizer = process, url, triton, tokenizer

    @property
    def workers(self) -> list[int]:
        return sorted(children(self.process.pid))

    @contextlib.contextmanager
    def only(self, index: int):
        others = [pid for pid in self.workers if pid != self.workers[index]]
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in others:
                os.kill(pid, signal.SIGCONT)

    def say(self, text: str, wait: float = 0.0, end: bool = True) -> None:
        steps = [Step((token,), wait=wait) for token in self.tokenizer.encode(text)]
        rest = [Step((0,)), Step(final=True)] if end else [Step(hang=True)]
        self.triton.script = lambda tensors: [*steps, *rest]

    async def ask(self, method: str, tail: str = "", **body) -> httpx.Response:
        """Over a connection of its own: any worker that runs may take it."""
        async with httpx.AsyncClient(timeout=GENEROUS) as client:
            return await client.request(method, f"{self.url}{PATH}{tail}", json=body or None)

    async def create(self, **fields) -> dict:
        return (await self.ask("POST", model="tiny", input="hi", **fields)).json()


@pytest.fixture
async def crew(card, tokenizer, tmp_path):
    triton = ScriptedTriton(card, lambda tensors: [Step(final=True)])
    await triton.start()
    log = tmp_path / "gateway.log"
    command = [sys.executable, "-m", "llmops.cli", "gateway", "--triton", f"127.0.0.1:{triton.port}"]
    with log.open("w") as file:
        process = subprocess.Popen([*command, "--port", "0", "--workers", "2"], stdout=file, stderr=subprocess.STDOUT)
    try:
        await eventually(lambda: "listens on" in log.read_text())
        crew = Crew(process, re.search(r"listens on (http://\S+)", log.read_text())[1], triton, tokenizer)
        await eventually(lambda: log.read_text().count("serving model tiny") == 2)
        yield crew
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(GENEROUS)
        await triton.stop()


async def meanwhile(crew, index, waiting):
    """Let worker `index` take `waiting` while the other is stopped, then let both go on. Gives the answer."""
    with crew.only(index):
        task = asyncio.create_task(waiting)
        await asyncio.sleep(0.3)
    return await asyncio.wait_for(task, GENEROUS)


async def test_a_finished_response_is_everywhere(crew):
    crew.say("Paris.")
    with crew.only(0):
        first = await crew.create()
    with crew.only(1):
        assert (await crew.ask("GET", f"/{first['id']}")).json() == first
        assert (await crew.ask("GET", f"/{first['id']}/input_items")).json()["data"][0]["role"] == "user"
        events = (await crew.ask("GET", f"/{first['id']}?stream=true&starting_after=2")).text
        assert events.count("event: ") == events.count("data: ") > 3
        second = await crew.create(previous_response_id=first["id"])
        assert second["status"] == "completed"
        prompt = crew.tokenizer.decode(crew.triton.requests[-1]["input_ids"])
        assert "<assistant>Paris." in prompt
        assert (await crew.ask("DELETE", f"/{first['id']}")).json()["deleted"]
    with crew.only(0):
        assert (await crew.ask("GET", f"/{first['id']}")).status_code == 404


async def test_cancel_reaches_the_worker_that_generates(crew):
    crew.say("Hello world! How are you? ", end=False)
    with crew.only(0):
        running = await crew.create(background=True)
    await eventually(lambda: crew.triton.active == 1)
    stopped = await meanwhile(crew, 1, crew.ask("POST", f"/{running['id']}/cancel"))
    assert (stopped.status_code, stopped.json()["status"]) == (200, "cancelled")
    await eventually(lambda: crew.triton.active == 0)
    for index in (0, 1):
        with crew.only(index):
            assert (await crew.ask("GET", f"/{running['id']}")).json() == stopped.json()


async def test_a_stream_can_be_followed_from_the_other_worker(crew):
    crew.say("Hello world! How are you? Hello world!", wait=0.1)
    with crew.only(0):
        running = await crew.create(background=True)
    followed = (await meanwhile(crew, 1, crew.ask("GET", f"/{running['id']}?stream=true"))).text
    again = (await crew.ask("GET", f"/{running['id']}?stream=true")).text
    assert followed == again
    numbers = [json.loads(line[6:])["sequence_number"] for line in followed.splitlines() if line.startswith("data: ")]
    assert numbers == list(range(len(numbers)))
    assert "response.completed" in followed


async def test_a_worker_that_dies_takes_its_responses_with_it(crew):
    crew.say("Hello world! ", end=False)
    with crew.only(0):
        running = await crew.create(background=True)
    victim = crew.workers[0]
    os.kill(victim, signal.SIGKILL)
    await eventually(lambda: victim not in crew.workers)
    lost = (await crew.ask("GET", f"/{running['id']}")).json()
    assert lost["status"] == "failed"
    assert "gone" in lost["error"]["message"]
    await eventually(lambda: len(crew.workers) == 2)
    assert (await crew.ask("GET", f"/{running['id']}")).json() == lost


async def test_many_at_once(crew):
    crew.say("Paris.")
    made = await asyncio.gather(*(crew.create() for _ in range(60)))
    fetched = await asyncio.gather(*(crew.ask("GET", f"/{one['id']}") for one in made))
    assert [answer.json() for answer in fetched] == made
