"""What the door asks of a request, stage by stage: `python -m llmops.perf.lab.benchmarks.door`.

Keys, limits and usage as a gateway has them, driven as its door and an answer drive them, in one process without HTTP
and Triton. CPU is this process's own, of all its threads; PostgreSQL's and Valkey's are theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import uvloop

from llmops.gateway.auth.authentication import Authentication, create_authentication
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.http.server import tune_garbage_collector
from llmops.gateway.interfaces import Outcome, Usage
from llmops.gateway.ratelimit.rate_limit_check import RateLimitCheck, create_limit_check
from llmops.gateway.settings import GatewaySettings, UsageSettings
from llmops.gateway.usage.lazy_billing import create_billing
from llmops.gateway.usage.usage_check import UsageCheck, create_usage_check
from llmops.perf.lab.benchmarks.accounts import account
from llmops.perf.lab.harness.figures import Section
from llmops.perf.lab.harness.servers import Postgres, Valkey
from llmops.perf.lab.mock_engine.repository import NAME

ROUNDS, REQUESTS, AT_ONCE = 7, 400, 8
# of a gateway with little to do: events of one second that are shipped
FEW = 20
PROMPT, ANSWER = 64, 8
TASKS = "tasks"
SHIPPED = "usage: synced, and shipped to the store"
_OVER = Outcome(200, "stop", Usage(PROMPT, ANSWER))


class Request:
    """One request on its way through the door. `key` is what it sends."""

    def __init__(self, key: str) -> None:
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [
                (b"host", b"localhost:8000"),
                (b"content-type", b"application/json"),
                (b"authorization", f"Bearer {key}".encode()),
                (b"content-length", b"412"),
            ],
        }
        self.context = RequestContext("req_8beb6e669f618ec87e5d28e71f2c3d4e", "/v1/chat/completions")


class Rooms:
    """The rooms of one gateway, in the order in which a request meets them."""

    def __init__(self, access: Authentication, limits: RateLimitCheck, usage: UsageCheck) -> None:
        self.access, self.limits, self.usage = access, limits, usage

    async def nothing(self, one: Request) -> None:
        return

    async def ask(self, one: Request) -> None:
        await self.access.before(one.scope, one.context)

    async def enter(self, one: Request) -> None:
        await self.limits.before(one.scope, one.context)

    async def begin(self, one: Request) -> None:
        await self.usage.before(one.scope, one.context)
        tally = one.context.tally
        assert tally is not None
        tally.begin(NAME, "chatcmpl-8beb6e669f618ec87e5d28e7", PROMPT)

    async def reserve(self, one: Request) -> None:
        grant = one.context.grant
        assert grant is not None
        await grant.tokens(NAME, PROMPT, ANSWER)
        grant.follow(lambda: Usage(PROMPT, ANSWER))

    async def tell(self, one: Request) -> None:
        assert one.context.grant is not None
        one.context.grant.headers()

    async def end(self, one: Request) -> None:
        tally = one.context.tally
        assert tally is not None
        for tokens in range(ANSWER):
            tally.count(tokens + 1)
        tally.end(_OVER, time.perf_counter())

    async def leave(self, one: Request) -> None:
        self.limits.after(one.context, _OVER)
        self.usage.after(one.context, _OVER)
        self.access.after(one.context, _OVER)

    async def ship(self) -> None:
        """All of what is in the journal is in the store."""
        desk = self.usage.desk
        assert desk is not None
        await desk.settle(60)

    @property
    def stages(self) -> dict[str, Callable[[Request], Awaitable[None]]]:
        return {
            "access: whose key it is": self.ask,
            "limits: what bounds it": self.enter,
            "limits: tokens and money reserved": self.reserve,
            "usage: a place on the page": self.begin,
            "limits: headers": self.tell,
            "usage: the event in the journal": self.end,
            "limits: settled": self.leave,
        }


def measure() -> Section:
    text = (
        f"A key with every limit, of a tenant with every limit but places; {AT_ONCE} requests at a time, medians of "
        f"{ROUNDS} rounds of {REQUESTS}, each shipped as one batch. Opcodes are Python's, on the event loop; a whole "
        "gateway takes longer for each. PostgreSQL and Valkey use CPU of their own, which is not in it."
    )
    section = Section("The door, stage by stage", "python -m llmops.perf.lab.benchmarks.door", text)
    with section, tempfile.TemporaryDirectory() as folder:
        uvloop.run(_stages("SQLite", f"sqlite:///{folder}/store.db", None, Path(folder), section, 60.0))
        with Postgres() as store, Valkey() as valkey:
            uvloop.run(_stages("PostgreSQL and Valkey", store.url, valkey.url, Path(folder), section, 120.0))
    return section


async def _stages(name: str, store: str, redis: str | None, folder: Path, section: Section, most: float) -> None:
    key = await account(store)
    settings = GatewaySettings(port=0, store=store, redis=redis, usage=UsageSettings(journal=folder / "journal"))
    async with _opened(settings) as rooms:
        await _round(rooms, key, REQUESTS)
        tune_garbage_collector()
        rounds = [await _round(rooms, key, REQUESTS) for _ in range(ROUNDS)]
        opcodes = await _opcodes(rooms, key)
        for stage in rounds[0]:
            told = f"{name}: {stage}" + (f" ({opcodes[stage]:.0f} opcodes)" if stage in opcodes else "")
            section.add(told, statistics.median(one[stage] for one in rounds), "µs/request")
        section.add(f"{name}: all", statistics.median(sum(one.values()) for one in rounds), "µs/request", most)
        few = [(await _round(rooms, key, FEW))[SHIPPED] for _ in range(ROUNDS)]
        section.add(f"{name}: {SHIPPED}, {FEW} at a time", statistics.median(few), "µs/request")


@contextlib.asynccontextmanager
async def _opened(settings: GatewaySettings) -> AsyncIterator[Rooms]:
    billing, access = create_billing(settings), create_authentication(settings)
    limits, usage = create_limit_check(settings, billing), create_usage_check(settings, billing)
    assert billing is not None
    assert access is not None
    assert limits is not None
    assert usage is not None
    await billing.start()
    await limits.gate.limiter.start()
    await usage.start()
    try:
        yield Rooms(access, limits, usage)
    finally:
        await usage.close()
        await access.close()
        await limits.gate.close()
        await billing.close()


async def _round(rooms: Rooms, key: str, requests: int) -> dict[str, float]:
    """µs per request of each stage, without the tasks that all of them have in here."""
    stages = {TASKS: rooms.nothing, **rooms.stages}
    costs = dict.fromkeys(stages, 0.0)
    for begun in range(0, requests, AT_ONCE):
        some = [Request(key) for _ in range(min(AT_ONCE, requests - begun))]
        for stage, do in stages.items():
            began = time.process_time()
            await asyncio.gather(*map(do, some))
            costs[stage] += time.process_time() - began
    tasks = costs.pop(TASKS)
    costs = {stage: cost - tasks for stage, cost in costs.items()}
    began = time.process_time()
    await rooms.ship()
    costs[SHIPPED] = time.process_time() - began
    return {stage: 1e6 * cost / requests for stage, cost in costs.items()}


async def _opcodes(rooms: Rooms, key: str, requests: int = 50) -> dict[str, float]:
    """Per request of each stage: what does not depend on what else the machine does."""
    some, opcodes = [Request(key) for _ in range(requests)], {}
    for stage, do in rooms.stages.items():
        with _counted() as counted:
            for one in some:
                await do(one)
        opcodes[stage] = counted[0] / requests
    return opcodes


@contextlib.contextmanager
def _counted() -> Iterator[list[int]]:
    """Counts what Python executes in this thread meanwhile."""
    opcodes = [0]

    def seen(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        opcodes[0] += event == "opcode"
        return seen

    sys.settrace(seen)
    try:
        yield opcodes
    finally:
        sys.settrace(None)


if __name__ == "__main__":
    measure()
