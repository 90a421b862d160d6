"""Streams that a TCP proxy cuts, resumed at another gateway: `python -m tests.faults.stream_cuts` (make faults).

The proxy resets each connection after some bytes, in the middle of lines and of headers. What a client puts together
must be the bytes of the uncut stream, and nobody else may read it.
"""

import asyncio
import random
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import click
import httpx

from tests.faults.gateway_kills import store_is_open, told_answers
from tests.support.forked_gateways import ForkedGateway
from tests.support.resuming_reader import CHAT, OPENAI, BackgroundReader, ResumingReader
from tests.support.servers import Valkey
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import eventually

#: Bytes after which a connection is reset, at least and at most: some do not get past the headers of their answer.
CUT_AFTER = (100, 6000)
#: Streams at once.
AT_ONCE = 16


async def cut_streams(folder: Path, streams: int, tokens: int = 120, seed: int = 27) -> tuple[int, float]:
    """Read streams through proxies that cut them. Returns the number of cuts and the seconds that it took.

    Raises AssertionError if a stream is not what it is without a cut.
    """
    told, chance = told_answers(folder, tokens, wait=0.01), random.Random(seed)
    await told.triton.start()
    began = time.monotonic()
    with Valkey() as valkey:
        settings = {"triton": told.triton.address, "store": f"sqlite:///{folder}/store.db", "open": True}
        gateways = [ForkedGateway(**settings, redis=valkey.url) for _ in range(2)]
        try:
            for one in gateways:
                await one.ready()
                await eventually(partial(store_is_open, one))
            async with AsyncExitStack() as stack:
                made = [TcpProxy(f"127.0.0.1:{one.port}", lambda: chance.randint(*CUT_AFTER)) for one in gateways]
                proxies = [await stack.enter_async_context(one) for one in made]
                # without a pool: each request has a connection of its own
                limits = httpx.Limits(max_keepalive_connections=0)
                clients = [httpx.AsyncClient(base_url=f"http://{one.address}", limits=limits) for one in proxies]
                for client in clients:
                    await stack.enter_async_context(client)
                turns = asyncio.Semaphore(AT_ONCE)

                async def read(number: int) -> None:
                    question, at = f"Number {number}?", chance.randrange(2)
                    reader = _reader(number, question)
                    async with turns:
                        while reader.ended is None:
                            with suppress(httpx.TransportError):
                                await reader.read(clients[at])
                            at = 1 - at
                    whole = _reader(number, question)
                    whole.run = reader.run
                    await whole.whole(gateways[at].client)
                    assert (reader.text, reader.raw) == (told.text(question), whole.raw), question
                    url, key = f"{reader.path}/{reader.run}", {"authorization": "Bearer another"}
                    hidden = 404 if isinstance(reader, BackgroundReader) else 410
                    assert (await gateways[at].client.get(url, headers=key)).status_code == hidden, url

                await asyncio.gather(*map(read, range(streams)))
        finally:
            for one in gateways:
                await one.close()
            await told.triton.stop()
    return sum(one.cuts for one in proxies), time.monotonic() - began


def _reader(number: int, question: str) -> ResumingReader:
    return BackgroundReader(question) if number % 3 == 2 else ResumingReader(question, (CHAT, OPENAI)[number % 3])


@click.command()
@click.option("--streams", default=200, show_default=True)
def main(streams: int) -> None:
    """Cut STREAMS streams at random and resume them at another gateway."""
    with tempfile.TemporaryDirectory() as folder:
        cuts, seconds = asyncio.run(cut_streams(Path(folder), streams))
    print(f"{streams} streams with {cuts} cuts: all bytes as without, none for another key, in {seconds:.0f} s.")


if __name__ == "__main__":
    main()
