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
from gateway_conftest import GENEROUS
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from scripted_triton import ScriptedTriton

from llmops.gateway.observability.combined import combined


@contextlib.contextmanager
def started(log: Path, triton: str, count: int):
    """Workers in front of `triton`: the supervisor and its address."""
    command = [sys.executable, "-m", "llmops.cli", "gateway", "--triton", triton, "--port", "0"]
    with log.open("w") as file:
        process = subprocess.Popen([*command, "--workers", str(count)], stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + GENEROUS
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
    deadline = time.monotonic() + GENEROUS
    while True:
        try:
            return urllib.request.urlopen(url, timeout=GENEROUS).read().decode()
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
    deadline = time.monotonic() + GENEROUS
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
    assert process.wait(GENEROUS) == 0, log.read_text()
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_workers_end_with_a_supervisor_that_is_killed(gateway) -> None:
    process, url, _ = gateway
    get(f"{url}/health/live")
    pids = workers(process.pid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + GENEROUS
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
    environment = {**os.environ, "LLMOPS_TEST_MARK": mark, "TMPDIR": str(place)}
    started_ones = []

    def start(count: int, **more: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "llmops.cli", "gateway", "--triton", "127.0.0.1:9", "--port", "0"]
        process = subprocess.Popen(
            [*command, "--workers", str(count)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**environment, **more},
        )
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


def until(holds) -> None:
    deadline = time.monotonic() + GENEROUS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("milliseconds", [0, 3, 10, 20, 50])
def test_sigterm_while_workers_are_being_started_leaves_none(marked, milliseconds) -> None:
    start, mark, place = marked
    process = start(16)
    time.sleep(milliseconds / 1000)
    process.send_signal(signal.SIGTERM)
    # before it has its handlers, the signal ends it at once: then there is nothing to tidy up either
    assert process.wait(GENEROUS) in (0, -signal.SIGTERM)
    until(lambda: alive(mark) == [])
    assert list(place.iterdir()) == []


def test_a_supervisor_that_is_killed_leaves_no_worker_and_no_file(marked) -> None:
    start, mark, place = marked
    process = start(4)
    until(lambda: len(list(place.glob("*/*.sock"))) == 4)
    get(f"{process.url}/health/live")
    process.kill()
    process.wait()
    until(lambda: alive(mark) == [])
    assert list(place.iterdir()) == []


def test_what_was_killed_all_at_once_is_removed_by_the_next_gateway(marked) -> None:
    start, mark, place = marked
    process = start(3)
    until(lambda: len(list(place.glob("*/*.sock"))) == 3)
    get(f"{process.url}/health/live")
    (lost,) = place.iterdir()
    for pid in [process.pid, *workers(process.pid)]:
        os.kill(pid, signal.SIGSTOP)
    for pid in alive(mark):
        os.kill(pid, signal.SIGKILL)
    until(lambda: alive(mark) == [])
    assert (lost / "responses.db").exists()
    second = start(2)
    until(lambda: len(list(place.glob("*/*.sock"))) == 2)
    assert not lost.exists()
    third = start(2)
    until(lambda: len(list(place.glob("*/*.sock"))) == 4)
    for one in (second, third):
        one.send_signal(signal.SIGTERM)
        assert one.wait(GENEROUS) == 0


@pytest.mark.parametrize("length", [60, 100, 200])
def test_a_long_path_of_temporary_files(marked, tmp_path, length) -> None:
    start, _, _ = marked
    long = tmp_path / "l" / ("x" * max(1, length - len(str(tmp_path))))
    long.mkdir(parents=True)
    process = start(2, TMPDIR=str(long))
    get(f"{process.url}/health/live")
    process.send_signal(signal.SIGTERM)
    assert process.wait(GENEROUS) == 0
    assert list(long.iterdir()) == []


def answering(path: Path, data: bytes):
    """A sibling that says this, whatever it is asked."""

    async def answer(reader, writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        writer.close()

    return asyncio.start_unix_server(answer, path)


def http(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


WRONG = {
    "refused": http("401 Unauthorized", b'{"error": {"message": "no key", "code": null}}'),
    "broken": http("500 Internal Server Error", b"llmops_requests_total 5\n"),
    "garbage": http("200 OK", b"\xff{{,,}} 1 1 1 1\n# TYPE\n{ = }"),
    "unfinished": http("200 OK", b'llmops_requests_total{route="/x'),
    "no-http": b"what?",
    "silent": b"",
}


async def test_a_sibling_without_metrics_is_left_out(tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr("llmops.gateway.observability.combined.TIMEOUT", GENEROUS)
    own, others = CollectorRegistry(), []
    Counter("llmops_requests", "Requests.", registry=own).inc(2)
    # what all workers say of the same thing
    Gauge("llmops_replicas", "Replicas.", registry=own).set(3)
    for name, data in {**WRONG, "right": http("200 OK", generate_latest(own))}.items():
        others.append(await answering(tmp_path / name, data))
    (tmp_path / "nobody").touch()
    text = (await combined(own, [tmp_path / name for name in [*WRONG, "right", "nobody"]])).decode()
    assert "llmops_requests_total 4.0" in text
    assert "llmops_replicas 3.0" in text
    for name in [*WRONG, "nobody"]:
        assert f"the worker at {name} are left out" in caplog.text
    assert "the worker at right" not in caplog.text
    for other in others:
        other.close()


SUPERVISED = """
import os, signal, subprocess
from llmops.gateway.supervisor import Supervisor

supervisor = Supervisor(1)
other = subprocess.Popen(["sh", "-c", "read line; exit 7"])
print(other.pid, flush=True)

def work(index):
    print(os.getpid(), flush=True)
    signal.pause()

supervisor.run(work, lambda: None)
print(other.wait(), flush=True)
"""


def test_only_workers_are_waited_for() -> None:
    """Another child's end is for whoever started it, as Triton's is under `llmops up`."""
    process = subprocess.Popen([sys.executable, "-c", SUPERVISED], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin
    assert process.stdout
    try:
        other, first = int(process.stdout.readline()), int(process.stdout.readline())
        process.stdin.write(b"\n")
        process.stdin.flush()
        until(lambda: b") Z " in Path(f"/proc/{other}/stat").read_bytes())
        os.kill(first, signal.SIGKILL)
        assert int(process.stdout.readline()) not in (first, other)
        assert b") Z " in Path(f"/proc/{other}/stat").read_bytes()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == b"7\n"
        assert process.wait(GENEROUS) == 0
    finally:
        process.kill()
        process.communicate()
