"""Two control processes on one store: one leads, and the other when that one is gone."""

import asyncio
import os
import re
import signal
import sys

import httpx
import pytest

from llmops.control.leader_election import run_while_leading
from llmops.store.store_url import StoreUrl
from tests.support.waiting import GENEROUS, stop_tasks

LLMOPS = [sys.executable, "-c", "from llmops.cli.main import main; main()"]


class Candidate:
    """One that would lead; `leads` and `rests` are set in turn."""

    def __init__(self, url: str) -> None:
        self.leads, self.rests = asyncio.Event(), asyncio.Event()
        self.rests.set()
        self.task = asyncio.create_task(run_while_leading(StoreUrl.parse(url), asyncio.Event().wait, self._changed))

    def _changed(self, leads: bool) -> None:
        came, went = (self.leads, self.rests) if leads else (self.rests, self.leads)
        came.set()
        went.clear()

    async def end(self) -> None:
        await stop_tasks(self.task)


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr("llmops.control.leader_election.RETRY_INTERVAL", 0.05)


async def within(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 60)


async def test_one_leads_and_another_takes_over(url):
    first = Candidate(url)
    await within(first.leads)
    others = [Candidate(url) for _ in range(3)]
    await asyncio.sleep(0.5)
    assert not any(one.leads.is_set() for one in others)
    await first.end()
    assert first.rests.is_set()
    waiting = [asyncio.create_task(within(one.leads)) for one in others]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0.5)
    assert sum(one.leads.is_set() for one in others) == 1
    for task in waiting:
        task.cancel()
    for one in others:
        await one.end()


async def test_whose_lock_is_lost_with_the_server_stops_and_leads_again(own_postgres):
    url, stop, start = own_postgres
    one = Candidate(url)
    await within(one.leads)
    stop()
    await within(one.rests)
    start()
    await within(one.leads)
    await one.end()


async def test_a_leader_that_stands_still_is_replaced(own_postgres, monkeypatch):
    """Before the fix, no process led until the one that stood still went on, or TCP gave its machine up after hours."""
    url, *_ = own_postgres
    monkeypatch.setattr("llmops.control.leader_election.STILL_TIMEOUT", 0.5)
    with monkeypatch.context() as patch:
        patch.setattr("llmops.control.leader_election.RETRY_INTERVAL", GENEROUS)
        still = Candidate(url)
        await within(still.leads)
        await asyncio.sleep(0)
    other = Candidate(url)
    await within(other.leads)
    for one in (still, other):
        await one.end()


async def start(*arguments: str) -> tuple[asyncio.subprocess.Process, str]:
    """A process, and the line that it begins with."""
    pipes = dict.fromkeys(("stdout", "stderr"), asyncio.subprocess.PIPE)
    given = {"stdin": asyncio.subprocess.DEVNULL, "env": {**os.environ, "LLMOPS_API_KEY": ""}, **pipes}
    process = await asyncio.create_subprocess_exec(*LLMOPS, *arguments, **given)
    return process, (await asyncio.wait_for(process.stdout.readline(), 60)).decode()


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_the_command_serves_until_ctrl_c(url):
    process, line = await start("control", "--store", url, "--port", "0")
    assert re.fullmatch(
        rf"llmops control listens on http://127\.0\.0\.1:\d+ \(store {re.escape(url.removeprefix('sqlite:///'))}\), "
        r"without a key, and administered with one of scope admin only\.\n",
        line,
    )
    async with httpx.AsyncClient(timeout=60) as client:
        ready = await client.get(re.search(r"http://\S+", line).group() + "/health/ready")
        assert ready.json() == {"status": "ready"}
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, err.decode()) == (0, "")
