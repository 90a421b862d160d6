"""`llmops gateway --workers N`: N independent gateways on one port, each with a port of its own for its metrics."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmops.errors import InputError
from llmops.gateway.launcher import run
from llmops.gateway.settings import GatewaySettings
from tests.support.live_process import LiveProcess
from tests.support.scripted_triton import ScriptedTriton
from tests.support.waiting import GENEROUS, wait_until


@contextlib.contextmanager
def started(log: Path, triton: str, count: int):
    """Workers in front of `triton`: the supervisor and its address."""
    process = LiveProcess(gateway_command(triton, count), log, {"LLMOPS_RESPONSES__ENTRIES": "0"})
    try:
        url = process.found(r"listens on (http://\S+)")
        wait_until(lambda: len(workers(process.pid)) >= count)
        yield process, url
    finally:
        process.kill()


def gateway_command(triton: str, count: int) -> list[str]:
    program = str(Path(sys.executable).with_name("llmops"))
    return [program, "gateway", "--triton", triton, "--port", "0", "--workers", str(count)]


@pytest.fixture
def gateway(tmp_path):
    """Three workers in front of no Triton: /health/live and /metrics need none."""
    log = tmp_path / "gateway.log"
    with started(log, "127.0.0.1:9", 3) as (process, url):
        yield process, url, log


def workers(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def get(url: str) -> str:
    text = []

    def answers() -> bool:
        with contextlib.suppress(urllib.error.URLError):
            text.append(urllib.request.urlopen(url, timeout=GENEROUS).read().decode())
        return bool(text)

    wait_until(answers)
    return text[0]


def counted(text: str) -> int:
    found = re.search(r'llmops_requests_total\{route="/health/live",status="200"\} (\S+)', text)
    return int(float(found[1])) if found else 0


def pages(log: Path) -> list[str]:
    """Return the URLs of each worker's metrics."""
    return re.findall(r"http://\S+?/metrics", log.read_text())


def test_every_worker_is_scraped_for_itself(gateway) -> None:
    process, url, log = gateway
    get(f"{url}/health/live")
    assert len(workers(process.pid)) == len(pages(log)) == 3
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: get(f"{url}/health/live"), range(200)))
    each = [counted(get(page)) for page in pages(log)]
    assert sum(each) == 201
    # the same worker answers each time, also after it was started again
    assert [counted(get(page)) for page in pages(log)] == each
    victim = min(workers(process.pid))
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: victim not in (now := workers(process.pid)) and len(now) == 3)
    assert sorted(counted(get(page)) for page in pages(log))[0] == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "2 workers need a store"),
        ({"responses": {"entries": 0}, "quotas": {"each": {"rpm": 5}}}, "2 workers need Redis"),
        ({"store": "sqlite:////nowhere/store.db", "open": True}, "2 workers need Redis"),
        ({"responses": {"entries": 0}, "quotas": {"gateways": 3}}, "gateways that share Redis, and Redis is not set"),
    ],
)
def test_workers_that_could_not_share_are_refused(settings, said, monkeypatch) -> None:
    monkeypatch.setattr("llmops.gateway.launcher.keys_required", lambda settings: False)
    with pytest.raises(InputError, match=said):
        run(GatewaySettings(port=0, workers=2, **settings))


class SlowTriton(ScriptedTriton):
    """Takes its time to say what a model can do."""

    async def ModelConfig(self, request, context):
        await asyncio.sleep(1)
        return await super().ModelConfig(request, context)


async def test_every_worker_knows_the_models_from_its_first_answer_on(card, tmp_path) -> None:
    def listed(port: int) -> list[list[str]]:
        with started(tmp_path / "gateway.log", f"127.0.0.1:{port}", 3) as (_, url):
            # a connection each, so that all workers have their turn
            with ThreadPoolExecutor(16) as pool:
                answers = list(pool.map(lambda _: json.loads(get(f"{url}/v1/models")), range(48)))
            return [[model["id"] for model in answer["data"]] for answer in answers]

    async with SlowTriton(card, lambda tensors: []) as triton:
        assert await asyncio.to_thread(listed, triton.port) == [["tiny"]] * 48


def environment_of(pid: Path) -> bytes:
    try:
        return (pid / "environ").read_bytes()
    except OSError:
        return b""


def alive(mark: str) -> list[int]:
    """Processes that were started with this mark in their environment."""
    needle = f"LLMOPS_TEST_MARK={mark}".encode()
    return [int(one.name) for one in Path("/proc").iterdir() if one.name.isdecimal() and needle in environment_of(one)]


@pytest.fixture
def marked(tmp_path):
    """Starts marked gateways whose temporary files are in tmp_path/t; whatever they leave behind is ended."""
    mark, place = f"{os.getpid()}-{tmp_path.name}", tmp_path / "t"
    place.mkdir()
    env = {**os.environ, "LLMOPS_TEST_MARK": mark, "TMPDIR": str(place), "LLMOPS_RESPONSES__ENTRIES": "0"}
    started_ones = []

    def start(count: int) -> subprocess.Popen:
        command = gateway_command("127.0.0.1:9", count)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
        started_ones.append(process)
        assert process.stdout is not None
        process.url = re.search(r"http://\S+", process.stdout.readline())[0]
        return process

    yield start, mark, place
    for pid in alive(mark):
        os.kill(pid, signal.SIGKILL)
    for process in started_ones:
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("milliseconds", [0, 20])
def test_sigterm_while_workers_are_being_started_leaves_none(marked, milliseconds) -> None:
    start, mark, place = marked
    process = start(6)
    time.sleep(milliseconds / 1000)
    process.send_signal(signal.SIGTERM)
    # before it has its handlers, the signal ends it at once: then there is nothing to tidy up either
    assert process.wait(GENEROUS) in (0, -signal.SIGTERM)
    wait_until(lambda: alive(mark) == [])
    assert list(place.iterdir()) == []


def test_a_supervisor_that_is_killed_leaves_no_worker_and_no_file(marked) -> None:
    start, mark, place = marked
    process = start(3)
    wait_until(lambda: len(workers(process.pid)) == 3)
    get(f"{process.url}/health/live")
    process.kill()
    process.wait()
    wait_until(lambda: alive(mark) == [])
    assert list(place.iterdir()) == []
