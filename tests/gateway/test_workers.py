"""`llmops gateway --workers N`: one port, N processes, one /metrics."""

from __future__ import annotations

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


@pytest.fixture
def gateway(tmp_path):
    """Three workers in front of no Triton: /health/live and /metrics need none."""
    log = tmp_path / "gateway.log"
    command = [
        sys.executable,
        "-m",
        "llmops.cli",
        "gateway",
        "--triton",
        "127.0.0.1:9",
        "--port",
        "0",
        "--workers",
        "3",
    ]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 60
    url = None
    while time.monotonic() < deadline and url is None:
        assert process.poll() is None, log.read_text()
        if found := re.search(r"listens on (http://\S+)", log.read_text()):
            url = found[1]
        time.sleep(0.05)
    while time.monotonic() < deadline and len(workers(process.pid)) < 3:
        time.sleep(0.05)
    yield process, url, log
    process.kill()
    process.wait()


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
