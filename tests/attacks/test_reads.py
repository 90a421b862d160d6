"""Attack: requests that no quota counts, and that reach an engine, a server, a store or another process."""

import asyncio
import contextlib
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import httpx

from llmops.gateway.ratelimit.read_limit import MAX_OPEN_READS
from llmops.store.factory import open_store
from llmops.store.tables import api_keys
from tests.attacks.harness import MIB, Neighbour, connect, record, scaled, status
from tests.store.control_client import make_key
from tests.support.live_process import LLMOPS, LiveProcess
from tests.support.waiting import wait_until

ATTACKERS = 8

#: Share of one core that a flood of one kind of read may take of others' answers: their p95, in seconds.
OTHERS_P95 = 0.25

#: Share of a core that all readers of an owner's answers may take together.
FOLLOWED_CPU = 0.45

READS = ["/metrics", "/health/ready", "/v1/models", "/v1/responses/resp_x", "/openapi.json", "/docs", "/none"]


def flood(gateway, path: str, seconds: float) -> Counter[int]:
    """Ask for `path` on eight connections without a pause; the number of answers by status."""
    answers: Counter[int] = Counter()
    until = time.monotonic() + seconds

    def ask() -> None:
        with connect(gateway, "127.0.3.1") as made:
            answer = made.makefile("rb")
            while time.monotonic() < until:
                made.sendall(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode())
                answers[int(answer.readline().split()[1])] += 1
                length = 0
                while (line := answer.readline()) not in (b"\r\n", b""):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                answer.read(length)

    with ThreadPoolExecutor(ATTACKERS) as pool:
        list(pool.map(lambda _: ask(), range(ATTACKERS)))
    return answers


def test_health_checks_reach_no_engine(start, engine):
    gateway, seconds = start(engine.address), scaled(2, 10)
    before = engine.requests
    answers = flood(gateway, "/health/ready?generate=true", seconds)
    record(f"{answers} in {seconds} s")
    assert (set(answers), engine.requests - before) == ({200}, 0)


def test_a_flood_of_reads_leaves_room_for_others(start, engine):
    # a short flood reaches a limit of 100 a second only on a machine that does nothing else
    gateway = start(engine.address, limits={"reads_per_second": scaled(20, 100)})
    seconds = scaled(0.5, 10)
    for path in scaled(["/metrics", "/v1/models"], READS):
        # the first reader of /openapi.json waits for it to be made, once in the life of a gateway
        flood(gateway, path, 0.01)
        with Neighbour(gateway, p95=OTHERS_P95):
            cpu = gateway.cpu()
            answers = flood(gateway, path, seconds)
            used = gateway.cpu() - cpu
        record(f"{path}: {answers}, {1e3 * used / answers.total():.2f} ms of CPU each")
        if path.startswith("/v1/") or path == "/openapi.json":
            assert answers[429] > 0, path


def test_followers_of_answers_cost_no_more_than_a_few(start, own_engine):
    """An owner reads background answers on many connections and with many keys, which no quota counts."""
    gateway = start(own_engine(100_000, 0.005).address, limits={"reads_per_second": 1000}, log_level="error")
    body = {"model": "tiny", "input": "hi", "background": True, "max_output_tokens": 90_000}
    answers = [httpx.post(f"{gateway.url}/v1/responses", json=body).json()["id"] for _ in range(8)]
    alone = used_in(gateway, 1.0)
    number = scaled(70, 1000)
    readers = [connect(gateway, f"127.0.3.{caller}") for caller in (1, 2, 3) for _ in range(number)]
    try:
        for at, one in enumerate(readers):
            answer = answers[at % len(answers)]
            one.sendall(b"GET /v1/responses/%b?stream=true HTTP/1.1\r\nhost: x\r\n\r\n" % answer.encode())
        statuses = Counter(int(one.recv(12)[9:12]) for one in readers)
        with Neighbour(gateway, p95=OTHERS_P95):
            followed = used_in(gateway, 1.0)
    finally:
        for one in readers:
            one.close()
    record(f"{statuses}: {followed:.2f} s of CPU a second, {alone:.2f} without")
    assert statuses == {200: 3 * MAX_OPEN_READS, 429: len(readers) - 3 * MAX_OPEN_READS}
    assert followed < alone + FOLLOWED_CPU


def used_in(gateway, seconds: float) -> float:
    """Return the seconds of CPU that the gateway uses per second."""
    before, start = gateway.cpu(), time.monotonic()
    time.sleep(seconds)
    return (gateway.cpu() - before) / (time.monotonic() - start)


class LimitedControl(LiveProcess):
    """`llmops control` that may have 600 MiB of addresses."""

    def __init__(self, folder: Path, store: str) -> None:
        limited = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_AS, ({600 * MIB},) * 2)"
        command = ["-c", f"{limited}; os.execv(sys.argv[1], sys.argv[1:])", *LLMOPS, "control", "--store", store]
        super().__init__([sys.executable, *command, "--port", "0"], folder / "control.log")
        self.host, self.port = "127.0.0.1", int(self.found(r"listens on http://127.0.0.1:(\d+)"))


def test_slow_readers_of_a_long_list_do_not_end_control(tmp_path: Path, programs: contextlib.ExitStack) -> None:
    """Before the fix, each had a thread and the whole list in memory, and control answered nobody any more."""
    url = f"sqlite:///{tmp_path}/store.db"

    async def fill() -> str:
        secret, _, user = await make_key(url)
        rows = [
            {"hash": f"{number:064x}", "id": f"key-{number}", "prefix": "sk-llmops-ab", "user_id": user}
            | {"tier": "free", "scopes": ["inference"], "created_at": datetime(2026, 1, 1, tzinfo=UTC)}
            for number in range(scaled(4000, 20_000))
        ]
        async with await open_store(url) as store, store.write() as connection:
            await connection.execute(api_keys.insert(), rows)
        return secret

    head = f"host: x\r\nauthorization: Bearer {asyncio.run(fill())}\r\n\r\n"
    control = LimitedControl(tmp_path, url)
    programs.callback(control.stop)
    sent = f"GET /api/admin/keys HTTP/1.1\r\n{head}".encode()
    readers = [programs.enter_context(connect(control, receive_buffer=4096)) for _ in range(100)]
    with Neighbour(control):
        for reader in readers:
            reader.sendall(sent)
        answers = Counter(reader.recv(15) for reader in readers)
    record(f"{answers}, {control.peak() / MIB:.0f} MB")
    assert {int(answer.split()[1]) for answer in answers} <= {200, 429, 503}
    for reader in readers:
        reader.close()
    wait_until(lambda: status(control, sent) == 200, "an answer after the slow readers")
