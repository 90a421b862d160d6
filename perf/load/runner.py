"""Running a workload on a client.

The load is a closed loop of users, or an open loop with arrivals at set times.
"""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import uvloop

from llmops.errors import InputError
from llmops.perf.clients.base import Client
from llmops.perf.records import Record
from llmops.perf.workloads.base import Workload

KINDS = ("constant", "poisson", "bursty")
#: Shape of the gamma distribution of bursty arrivals. Shape 1 is Poisson, and the squared
#: coefficient of variation is 1/BURSTY.
BURSTY = 0.25


def arrival_times(kind: str, rate: float, rng: random.Random) -> Iterator[float]:
    """Yield the arrival times of an endless open loop, in seconds from its start.

    Args:
        kind: The arrival process, one of KINDS. `bursty` draws gaps from a gamma distribution with
            shape BURSTY, like `--burstiness` in the benchmarks of vLLM and TensorRT-LLM.
        rate: The mean rate in requests per second.
        rng: The source of random numbers.
    """
    if rate <= 0:
        raise InputError(f"The rate must be above 0 requests/s, not {rate}.")
    if kind == "constant":
        return (index / rate for index in count())
    shape = {"poisson": 1.0, "bursty": BURSTY}.get(kind)
    if shape is None:
        raise InputError(f"Arrival process {kind!r} is unknown; choose one of {', '.join(KINDS)}.")
    return _gamma(rate, shape, rng)


def _gamma(rate: float, shape: float, rng: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        now += rng.gammavariate(shape, 1 / (rate * shape))
        yield now


T = TypeVar("T")

_local = threading.local()


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on uvloop, which halves the load generator's CPU time, and return its result.

    All calls in a thread share one event loop, because grpc's poller binds to the first loop that
    it sees and fails on a second one.
    """
    loop: asyncio.AbstractEventLoop | None = getattr(_local, "loop", None)
    if loop is None:
        loop = _local.loop = uvloop.new_event_loop()
    task = loop.create_task(main)
    try:
        return loop.run_until_complete(task)
    except KeyboardInterrupt:
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        raise
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())


@dataclass(frozen=True)
class StopCondition:
    """The condition that ends a phase.

    Attributes:
        sessions: Number of sessions after which the phase ends, or None.
        seconds: Seconds after which the phase ends, or None. The condition that is met first
            counts.
    """

    sessions: int | None = None
    seconds: float | None = None


@dataclass
class LoadRun:
    """The records of a phase.

    Attributes:
        start: The start on the load generator's monotonic clock, in seconds.
        end: The end on the same clock.
        records: The record of each request.
        cpu: CPU seconds of the load generator.
    """

    start: float
    end: float = 0.0
    records: list[Record] = field(default_factory=list)
    cpu: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def stayed(self) -> list[Record]:
        """Return the records of all requests that the load generator did not cancel on purpose."""
        return [record for record in self.records if not record.cancelled]


class Runner:
    """A runner that sends a workload through a client, in any number of phases.

    Session numbers continue from phase to phase, so that no phase repeats the sessions of another.
    """

    def __init__(
        self,
        client: Client,
        workload: Workload,
        on_record: Callable[[Record], None] | None = None,
        think_time: float = 0.0,
    ) -> None:
        self._client = client
        self._workload = workload
        self._on_record = on_record
        self._think_time = think_time
        self._next_session = count()

    async def closed(self, concurrency: int, limit: StopCondition) -> LoadRun:
        """Run a closed loop of `concurrency` users.

        Each user starts a session as soon as the last one has ended.
        """
        return await self._measured(lambda run: self._users(run, concurrency, limit))

    async def open(
        self, arrivals: Iterable[float], limit: StopCondition, max_concurrency: int | None = None
    ) -> LoadRun:
        """Run an open loop, whose sessions start at set times even if earlier sessions still run.

        Args:
            arrivals: The start times in seconds from now.
            limit: The condition that ends the phase.
            max_concurrency: Maximum number of concurrent sessions, or None. A session above the
                limit waits, and its latencies still count from its arrival.
        """
        return await self._measured(lambda run: self._arrive(run, arrivals, limit, max_concurrency))

    async def _measured(self, phase: Callable[[LoadRun], object]) -> LoadRun:
        run, cpu = LoadRun(start=time.perf_counter()), time.process_time()
        await phase(run)  # type: ignore[misc]
        run.cpu = time.process_time() - cpu
        run.end = max((record.end for record in run.records), default=time.perf_counter())
        return run

    async def _users(self, run: LoadRun, concurrency: int, limit: StopCondition) -> None:
        sessions = iter(range(limit.sessions)) if limit.sessions is not None else count()
        deadline = run.start + limit.seconds if limit.seconds is not None else float("inf")

        async def user() -> None:
            for _ in sessions:
                if time.perf_counter() >= deadline:
                    return
                await self._session(run, None, 0.0)

        await _all([user() for _ in range(concurrency)])

    async def _arrive(
        self, run: LoadRun, arrivals: Iterable[float], limit: StopCondition, max_concurrency: int | None
    ) -> None:
        places = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        tasks: set[asyncio.Task[None]] = set()
        try:
            for index, offset in enumerate(arrivals):
                if index == limit.sessions or (limit.seconds is not None and offset >= limit.seconds):
                    break
                due = run.start + offset
                delay = due - time.perf_counter()
                if delay > 0:
                    await asyncio.sleep(delay)
                now = time.perf_counter()
                task = asyncio.create_task(self._place(places, run, now, now - due))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _place(self, places: asyncio.Semaphore | None, run: LoadRun, start: float, lag: float) -> None:
        async with places or nullcontext():
            await self._session(run, start, lag)

    async def _session(self, run: LoadRun, start: float | None, lag: float) -> None:
        session = self._workload.session(next(self._next_session))
        record, turn = None, 0
        while (request := session.next(record)) is not None:
            if turn and self._think_time:
                await asyncio.sleep(self._think_time)
            record = await self._client.send(request, start)
            record.lag, record.turn = lag, turn
            run.records.append(record)
            if self._on_record is not None:
                self._on_record(record)
            start, lag, turn = None, 0.0, turn + 1


async def _all(coroutines: list) -> None:  # type: ignore[type-arg]
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
