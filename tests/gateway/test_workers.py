"""`llmops gateway --workers N`: one port, N processes, one /metrics."""

from __future__ import annotations

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
from scripted_triton import ScriptedTriton


@contextlib.contextmanager
def started(log: Path, triton: str, count: int):
    """Workers in front of `triton`: the supervisor and its address."""
    command = [sys.executable, "-m", "llmops.cli", "gateway", "--triton", triton, "--port", "0"]
    with log.open("w") as file:
        process = subprocess.Popen([*command, "--workers", str(count)], stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60
        while not (found := re.search(r"listens on (http://\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        while len(workers(process.pid)) < count:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def gateway(tmp_path):
    """Three workers in front of no Triton: /health/live and /metrics need none."""
    log = tmp_path / "gateway.log"
    with started(log, "127.0.0.1:9", 3) as (process, url):
        yield process, url, log


def workers(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def get(url: str) -> str:
    deadline = time.monotonic() + 30
    while True:
        try:
            return urllib.request.urlopen(url, timeout=10).read().decode()
        except urllib.error.URLError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def counted(text: str) -> int:
    return int(float(re.search(r'llmops_requests_total\{route="/health/live",status="200"\} (\S+)', text)[1]))


def test_metrics_of_all_workers_add_up(gateway) -> None:
    process, url, _ = gateway
    get(f"{url}/health/live")
    assert len(workers(process.pid)) == 3
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: get(f"{url}/health/live"), range(200)))
    # each scrape may reach another worker, and all of them know all
    assert [counted(get(f"{url}/metrics")) for _ in range(5)] == [201] * 5


def test_a_worker_that_dies_is_started_again(gateway) -> None:
    process, url, log = gateway
    get(f"{url}/health/live")
    victim = min(workers(process.pid))
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while victim in (now := workers(process.pid)) or len(now) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "ended with code -9; starting it again" in log.read_text()
    assert get(f"{url}/health/live")


def test_sigterm_ends_all_and_leaves_nothing(gateway) -> None:
    process, url, log = gateway
    get(f"{url}/health/live")
    pids = workers(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0, log.read_text()
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_workers_end_with_a_supervisor_that_is_killed(gateway) -> None:
    process, url, _ = gateway
    get(f"{url}/health/live")
    pids = workers(process.pid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


class SlowTriton(ScriptedTriton):
    """Takes its time to say what a model can do."""

    async def ModelConfig(self, request, context):
        await asyncio.sleep(1)
        return await super().ModelConfig(request, context)


async def test_every_worker_knows_the_models_from_its_first_answer_on(card, tmp_path) -> None:
    triton = SlowTriton(card, lambda tensors: [])
    await triton.start()

    def listed() -> list[list[str]]:
        with started(tmp_path / "gateway.log", f"127.0.0.1:{triton.port}", 3) as (_, url):
            # a connection each, so that all workers have their turn
            with ThreadPoolExecutor(16) as pool:
                answers = list(pool.map(lambda _: json.loads(get(f"{url}/v1/models")), range(48)))
            return [[model["id"] for model in answer["data"]] for answer in answers]

    try:
        assert await asyncio.to_thread(listed) == [["tiny"]] * 48
    finally:
        await triton.stop()
