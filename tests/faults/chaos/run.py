"""One run: load in one thread, kills in the other, then the books."""

import asyncio
import random
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from threading import Thread
from typing import Any

from sqlalchemy import func, select

from llmops.control.reconcile import served_tokens
from llmops.errors import ServerError
from llmops.store.factory import open_store
from llmops.store.tables import gateways, usage_records
from llmops.store.usage_queries import UsageFilter, find_sequence_gaps, sum_usage
from tests.faults.chaos.clients import Asked, ask_all
from tests.faults.chaos.ledger_audit import errors
from tests.faults.chaos.stage import Stage

# after the last request, without another row in the ledger; go-back-N may have to wait a few times
STILL_SECONDS = 300.0
Pauses = tuple[float, float]


@dataclass(frozen=True)
class Result:
    """`seconds` of the load, `arrival` until the ledger had everything after it; `made`: tokens by the engine's own
    count, where it was asked, `billed` those on the bill.
    """

    asked: list[Asked]
    finishes: Counter[str]
    deaths: Counter[str]
    wrong: list[str]
    seconds: float
    arrival: float
    made: int | None
    billed: int

    def lines(self) -> list[str]:
        done = sum(one.done for one in self.asked)
        begun = sum(bool(one.answer_id) for one in self.asked)
        deaths = ", ".join(f"{name} {count}" for name, count in sorted(self.deaths.items()))
        ends = ", ".join(f"{name} {count}" for name, count in sorted(self.finishes.items()))
        return [
            f"{len(self.asked)} requests in {self.seconds:.0f} s: {begun} began as their clients saw it, {done} done.",
            f"Killed: {deaths or 'nothing'}.",
            f"{sum(self.finishes.values())} rows ({ends}), all there {self.arrival:.0f} s after the last request.",
            *self._of_engine(),
            *self.wrong[:20],
            f"{len(self.wrong)} errors in the books." if self.wrong else "The books are right.",
        ]

    def _of_engine(self) -> list[str]:
        if self.made is None:
            return []
        return [f"The engine made {self.made:,} tokens, {self.billed:,} are billed; nobody was there for the others."]


def chaos(
    triton: str, model: str, requests: int, at_once: int = 48, pauses: Pauses = (2, 8), seed: int = 0, metrics: str = ""
) -> Result:
    """`pauses`: the shortest and the longest between two kills, in seconds; `metrics`: Triton's page.

    Raises ServerError when something does not come up again, or when usage does not arrive."""
    dice, asked = random.Random(seed), []
    with closing(Stage(triton, model)) as stage:
        urls = [program.url for program in stage.gateways]
        began = time.monotonic()
        clients = Thread(
            target=lambda: asked.extend(
                asyncio.run(ask_all(urls, stage.keys, model, requests, at_once, random.Random(seed + 1)))
            ),
            # a run that is interrupted must not go on asking for ever
            daemon=True,
        )
        clients.start()
        # processes end with the thread that started them, so they are started here
        stage.torment(lambda: not clients.is_alive(), dice, pauses)
        clients.join()
        seconds, over = time.monotonic() - began, time.monotonic()
        asyncio.run(_arrived(stage, asked))
        arrival = time.monotonic() - over
        rows, totals, missing = asyncio.run(_books(stage.postgres.url))
        made = asyncio.run(served_tokens([metrics])).get(model, 0) if metrics else None
        wrong = errors(asked, rows, totals, missing, made)
        finishes = Counter(str(row["finish_reason"]) for row in rows)
        return Result(asked, finishes, stage.deaths, wrong, seconds, arrival, made, totals["output_tokens"])


async def _arrived(stage: Stage, asked: list[Asked]) -> None:
    """Wait until nothing has come for a while and the gateways have nothing on its way."""
    moved, quiet, last = time.monotonic(), 0, -1
    async with await open_store(stage.postgres.url) as store:
        while quiet < 4:
            await asyncio.sleep(1.0)
            async with store.read() as connection:
                rows = await connection.scalar(select(func.count()).select_from(usage_records)) or 0
                marks = await connection.scalar(select(func.sum(gateways.c.next_seq))) or 0
            whole = rows == marks and rows == last and not stage.lag() and not _left(stage)
            moved = moved if rows == last else time.monotonic()
            quiet, last = quiet + 1 if whole else 0, rows
            if time.monotonic() - moved > STILL_SECONDS:
                found = f"{rows} rows, marks at {marks}, lag {stage.lag():.0f} s"
                raise ServerError(f"Usage did not arrive: {found}.\n{stage.said()}")


def _left(stage: Stage) -> bool:
    """Outboxes of dead gateways that no gateway has taken over yet."""
    return len(list((stage.folder / "usage").glob("*/gw-*"))) > len(stage.gateways)


async def _books(url: str) -> tuple[list[Any], dict[str, int], int]:
    async with await open_store(url) as store, store.read() as connection:
        rows = list((await connection.execute(select(usage_records))).mappings())
        (total,) = await sum_usage(connection, UsageFilter())
        names = ("requests", "input_tokens", "cached_tokens", "output_tokens", "cost_micros")
        return rows, {name: getattr(total, name) for name in names}, len(await find_sequence_gaps(connection))
