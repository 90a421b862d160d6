"""A herd of 5,000 clients on real sockets, which all send a request within five seconds.

Goals: the engines' queues hold only the prompts of the next step, all clients get an answer within
1.15 times the time that always-full engines need, the first tier is answered first, the retries of
rejected clients are spread over time, and the gateway's memory is bounded.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from llmops.perf.clients.http1 import HttpClient, render
from llmops.perf.lab.figures import Section
from llmops.perf.lab.open_load import words_of
from llmops.perf.lab.overload import SIZE, _watched
from tests.support.mock_engine.planned import constant
from tests.support.mock_engine.replicas import NAME, Engines, engines, front, keys_of
from tests.support.stack import Service

CLIENTS, ARRIVING, PROMPT, ANSWER = 5000, 5.0, 32, 8
REPLICAS, PLACES, BLOCKS, CHUNK = 2, 16, 2048, 1024
STEP, SEQUENCE, TOKEN = 0.04, 0.001, 0.0001
#: Seconds in which engines that are always full answer one request per sequence of their batches.
FULL_BATCH = ANSWER * STEP + (ANSWER - 1) * PLACES * SEQUENCE + PLACES * PROMPT * TOKEN
IDEAL = FULL_BATCH * CLIENTS / (REPLICAS * PLACES)
TIERS = (("paid", 0.1), ("standard", 0.6), ("batch", 0.3))
#: Maximum number of rejected clients that may return in one second: fewer than half of the first
#: arrivals per second.
MAX_RETURNS = 400
SETTINGS: dict[str, Any] = {
    "slo": {"ttft_p95": "500ms"},
    "tiers": {name: {} for name, _ in TIERS},
    "limits": {"connections": 2 * CLIENTS, "connections_per_client": 0},
}
CONDITIONS = (
    f"{CLIENTS:,} clients on connections of their own send a request within {ARRIVING:g} s to one gateway with "
    f"{REPLICAS} mock engines of {PLACES} sequences on the real Triton, and return as Retry-After says."
)


@dataclass
class HerdClient:
    """A client of the herd.

    Attributes:
        tier: The client's priority tier.
        tries: The time of each attempt, in seconds.
        ended: The time of the complete answer, or 0.
        errors: The messages of failed attempts.
    """

    tier: str
    tries: list[float] = field(default_factory=list)
    ended: float = 0.0
    errors: list[str] = field(default_factory=list)


def measure(engine: Path, section: Section) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paged = constant(STEP, TOKEN, BLOCKS, SEQUENCE, max_batch_size=PLACES, max_num_tokens=CHUNK)
        store = f"sqlite:///{folder}/store.db"
        keys = keys_of(store, [name for name, _ in TIERS])
        settings = {**SETTINGS, "store": store, "usage": {"outbox": f"{folder}/usage"}}
        with engines(engine, replace(paged, tokens_per_block=SIZE), REPLICAS) as stage:
            _measure(stage, settings, words_of(engine), keys, section)


def _measure(
    stage: Engines, settings: dict[str, Any], words: Sequence[int], keys: dict[str, str], section: Section
) -> None:
    with front(stage.replicas, settings) as gateway, _watched(stage) as queue:
        before, begun = _memory(gateway), time.perf_counter()
        clients = asyncio.run(_herd(gateway.address, words, keys))
        seconds = time.perf_counter() - begun
        memory = _memory(gateway) - before
    section.add("drained, relative to engines that are always full", seconds / IDEAL, "", 1.15)
    section.add("longest prefill backlog of an engine, in steps", queue.steps, "", 2)
    section.add("clients without an answer", sum(not one.ended or bool(one.errors) for one in clients), "", 0)
    for error, count in Counter(error for one in clients for error in one.errors).most_common(3):
        section.note(f"{count} times {error[:200]}")
    paid, standard = (median(one.ended for one in clients if one.tier == tier) for tier in ("paid", "standard"))
    section.add("paid: median time to the answer, relative to the next tier", paid / standard, "", 1)
    returns = Counter(int(at) for one in clients for at in one.tries[1:])
    section.add("rejected clients that return in one second", max(returns.values(), default=0), "", MAX_RETURNS)
    section.add("growth of the gateway's peak memory", memory, "MiB", 256)


def _memory(gateway: Service) -> float:
    """Return the peak resident memory of the gateway's processes so far, in MiB."""
    pages = [Path(f"/proc/{pid}/status").read_text() for pid in gateway.pids]
    return sum(int(found[1]) for page in pages if (found := re.search(r"VmHWM:\s+(\d+) kB", page))) / 1024


class HerdResponse:
    """A handler of one response, which keeps the status and Retry-After in seconds.

    `ended` is a future that is done at the end of the response.
    """

    def __init__(self) -> None:
        self.status, self.retry_after = 0, 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def headers(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status, self.retry_after = status, float(headers.get(b"retry-after-ms", 0)) / 1000

    def body(self, data: bytes, now: float) -> None: ...

    def complete(self) -> None:
        self.ended.set_result(None)

    def failed(self, kind: str) -> None:
        self.ended.set_exception(EOFError(kind))


def _request(client: HttpClient, words: Sequence[int], key: str, rng: random.Random) -> bytes:
    prompt = {"prompt": [rng.choice(words) for _ in range(PROMPT)], "max_tokens": ANSWER, "ignore_eos": True}
    body = json.dumps({"model": NAME, "temperature": 0, **prompt}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    return render("POST", "/v1/completions", client.netloc, headers, body)


async def _herd(url: str, words: Sequence[int], keys: dict[str, str]) -> list[HerdClient]:
    rng = random.Random(0)
    names, shares = [name for name, _ in TIERS], [share for _, share in TIERS]
    clients = [HerdClient(tier) for tier in rng.choices(names, shares, k=CLIENTS)]
    begun = time.perf_counter()

    async def run(one: HerdClient, start: float) -> None:
        connection = HttpClient(url)
        request = _request(connection, words, keys[one.tier], rng)
        await asyncio.sleep(start)
        while not one.ended:
            one.tries.append(time.perf_counter() - begun)
            response = HerdResponse()
            try:
                (connection.idle() or await connection.connect()).send(request, response)
                await response.ended
            except (OSError, EOFError) as error:
                one.errors.append(repr(error))
            if response.status == 200:
                one.ended = time.perf_counter() - begun
            else:
                await asyncio.sleep(response.retry_after or 1.0)
        connection.close()

    await asyncio.gather(*(run(one, rng.uniform(0, ARRIVING)) for one in clients))
    return clients
