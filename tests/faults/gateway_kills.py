"""`kill -9` of gateways under their streams, with a real Valkey: `python -m tests.faults.gateway_kills` (make faults).

Every stream is read on at another gateway, to its end. Its text must be the whole answer, and the ledger must have one
event of it, with all of its tokens.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import httpx
from sqlalchemy import select

from llmops.gateway.text.tokenizer import TextTokenizer
from llmops.store.factory import open_store
from llmops.store.tables import usage_records
from tests.support.forked_gateways import ForkedGateway
from tests.support.gateway_stack import card_of
from tests.support.resuming_reader import CHAT, OPENAI, BackgroundReader, ResumingReader
from tests.support.servers import Valkey
from tests.support.tokenizer_files import write_tokenizer
from tests.support.told_answers import ToldAnswers
from tests.support.waiting import GENEROUS, eventually

LEASE = 1.0
Ask = Callable[[int], ResumingReader]
Expected = Callable[[ResumingReader, httpx.AsyncClient], Awaitable[str] | str]


async def kill_under(gateways: Sequence[ForkedGateway], readers: Sequence[ResumingReader]) -> list[float]:
    """Kill the first gateway while it has all streams, and read them on. Returns the seconds until each goes on."""
    killed = asyncio.Event()
    times: list[float] = []
    at_kill = 0.0

    async def read(reader: ResumingReader) -> None:
        nonlocal waiting
        await reader.read(gateways[0].client, 3)
        waiting -= 1
        try:
            await reader.read(gateways[0].client)
        except httpx.TransportError:
            await killed.wait()
        seen = len(reader.raw)
        while reader.ended is None:
            try:
                await reader.read(random.choice(gateways[1:]).client, seen + 1)
            except httpx.TransportError:
                continue
            if len(reader.raw) > seen:
                times.append(time.monotonic() - at_kill)
                await reader.whole(random.choice(gateways[1:]).client)

    waiting = len(readers)
    reading = [asyncio.create_task(read(one)) for one in readers]
    await eventually(lambda: not waiting or any(one.done() and one.exception() for one in reading))
    gateways[0].kill()
    at_kill = time.monotonic()
    killed.set()
    await asyncio.gather(*reading)
    return times


async def store_is_open(gateway: ForkedGateway) -> bool:
    return (await gateway.client.get("/v1/responses/none")).status_code == 404


async def billed(url: str, run_ids: set[str]) -> dict[str, list[tuple[int, str]]]:
    """Return tokens and finish reasons of all usage events, by answer."""
    found: dict[str, list[tuple[int, str]]] = {one: [] for one in run_ids}
    async with await open_store(url) as store, store.read() as connection:
        for row in (await connection.execute(select(usage_records))).mappings():
            if row["request_id"] in found:
                found[row["request_id"]].append((row["output_tokens"], row["finish_reason"]))
    return found


async def kill_rounds(
    folder: Path, triton: str, valkey: str, rounds: int, ask: Ask, expected: Expected, streams: int = 32
) -> list[float]:
    """Kill a gateway `rounds` times under `streams` streams each.

    Raises AssertionError if a text or a bill is wrong. Returns the seconds from the kills until the streams went on.
    """
    url = f"sqlite:///{folder}/store.db"
    settings: dict[str, Any] = {"triton": triton, "store": url, "open": True, "redis": valkey}
    settings |= {"usage": {"outbox": str(folder / "usage")}, "resume": {"lease": f"{LEASE}s"}}
    gateways = [ForkedGateway(**settings) for _ in range(2)]
    asked: list[ResumingReader] = []
    times: list[float] = []
    try:
        for number in range(rounds):
            for one in gateways:
                await one.ready()
                # on a busy machine a store may take longer to open than a request waits for it
                await eventually(partial(store_is_open, one))
            readers = [ask(number * streams + at) for at in range(streams)]
            times += await kill_under(gateways, readers)
            asked += readers
            gateways = [*gateways[1:], ForkedGateway(**settings)]
            for reader in readers:
                text = expected(reader, gateways[0].client)
                assert reader.text == (text if isinstance(text, str) else await text), reader.body
        # the last one finds what the killed ones left, and must not bill it again
        await gateways[-1].ready()
        runs = {reader.run: reader for reader in asked}

        async def all_billed() -> bool:
            return all((await billed(url, set(runs))).values())

        await eventually(all_billed)
    finally:
        for one in gateways:
            await one.close()
    last = await ForkedGateway(**settings).ready()
    outboxes = folder / "usage"
    await eventually(lambda: len(list(outboxes.rglob("gw-*"))) == 1, seconds=GENEROUS)
    await last.close()
    for run, events in (await billed(url, set(runs))).items():
        tokens = runs[run].ended["usage"]["completion_tokens"] if "usage" in (runs[run].ended or {}) else None
        assert len(events) == 1, (run, events)
        assert events[0][1] in ("stop", "length"), (run, events)
        assert tokens in (None, events[0][0]), (run, events, tokens)
    return times


def told_answers(folder: Path, tokens: int, wait: float) -> ToldAnswers:
    """Return a scripted engine that answers each question differently. `folder` receives its tokenizer."""
    (tokenizer_dir := folder / "tokenizer").mkdir()
    write_tokenizer(tokenizer_dir)
    tokenizer = TextTokenizer(tokenizer_dir)
    return ToldAnswers(card_of(tokenizer_dir, tokenizer), tokenizer, tokens, wait)


async def mock_rounds(
    folder: Path, rounds: int, streams: int = 32, tokens: int = 40, wait: float = 0.03
) -> list[float]:
    """Run the rounds with `told_answers`."""
    told = told_answers(folder, tokens, wait)
    await told.triton.start()

    def ask(number: int) -> ResumingReader:
        question = f"Number {number}?"
        return BackgroundReader(question) if number % 8 == 7 else ResumingReader(question, (CHAT, OPENAI)[number % 2])

    def expected(reader: ResumingReader, _: httpx.AsyncClient) -> str:
        return told.text(reader.body.get("input") or reader.body["messages"][0]["content"])

    try:
        with Valkey() as valkey:
            return await kill_rounds(folder, told.triton.address, valkey.url, rounds, ask, expected, streams)
    finally:
        await told.triton.stop()


@click.command()
@click.option("--rounds", default=100, show_default=True)
@click.option("--streams", default=32, show_default=True)
def main(rounds: int, streams: int) -> None:
    """Kill a gateway ROUNDS times under its streams."""
    with tempfile.TemporaryDirectory() as folder:
        times = asyncio.run(mock_rounds(Path(folder), rounds, streams))
    print(
        f"{rounds} kills under {streams} streams: {len(times)} streams went on at another gateway, all texts and bills "
        f"right; median {statistics.median(times):.1f} s, longest {max(times):.1f} s after the kill, with a lease of "
        f"{LEASE:.0f} s."
    )


if __name__ == "__main__":
    main()
