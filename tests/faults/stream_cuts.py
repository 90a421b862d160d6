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

from llmops.gateway.text.tokenizer import TextTokenizer
from tests.faults.gateway_kills import store_is_open
from tests.support.forked_gateways import ForkedGateway
from tests.support.gateway_stack import card_of
from tests.support.resuming_reader import CHAT, OPENAI, BackgroundReader, ResumingReader
from tests.support.servers import Valkey
from tests.support.tokenizer_files import write_tokenizer
from tests.support.told_answers import ToldAnswers
from tests.support.waiting import eventually

#: Bytes after which a connection is reset, at least and at most: some do not get past the headers of their answer.
CUT_AFTER = (100, 6000)
#: Streams at once.
AT_ONCE = 16


class CuttingProxy:
    """A TCP proxy in front of one gateway that resets its connections."""

    def __init__(self, port: int, chance: random.Random) -> None:
        self._port, self._chance = port, chance
        self.cuts = 0
        self._open: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End all connections."""
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def start(self) -> httpx.AsyncClient:
        """Listen, and return a client without a pool: each request has a connection of its own."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_keepalive_connections=0))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(task := asyncio.current_task())
        task.add_done_callback(self._open.discard)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        sending = asyncio.create_task(_copy(reader, up_writer))
        left = self._chance.randint(*CUT_AFTER)
        with suppress(ConnectionError):
            while data := await up_reader.read(4096):
                writer.write(data[:left])
                await writer.drain()
                left -= len(data)
                if left <= 0:
                    self.cuts += 1
                    break
        sending.cancel()
        for one in (writer, up_writer):
            one.transport.abort() if left <= 0 else one.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)


async def cut_streams(folder: Path, streams: int, tokens: int = 120, seed: int = 27) -> tuple[int, float]:
    """Read streams through proxies that cut them. Returns the number of cuts and the seconds that it took.

    Raises AssertionError if a stream is not what it is without a cut.
    """
    (tokenizer_dir := folder / "tokenizer").mkdir()
    write_tokenizer(tokenizer_dir)
    tokenizer, chance = TextTokenizer(tokenizer_dir), random.Random(seed)
    told = ToldAnswers(card_of(tokenizer_dir, tokenizer), tokenizer, tokens, wait=0.01)
    await told.triton.start()
    began = time.monotonic()
    with Valkey() as valkey:
        settings = {"triton": f"127.0.0.1:{told.triton.port}", "store": f"sqlite:///{folder}/store.db", "open": True}
        gateways = [ForkedGateway(**settings, redis=valkey.url) for _ in range(2)]
        try:
            for one in gateways:
                await one.ready()
                await eventually(partial(store_is_open, one))
            proxies = [CuttingProxy(one.client.base_url.port or 0, chance) for one in gateways]
            async with AsyncExitStack() as stack:
                for one in proxies:
                    stack.push_async_callback(one.close)
                clients = [await stack.enter_async_context(await one.start()) for one in proxies]

                turns = asyncio.Semaphore(AT_ONCE)

                async def read_in_turn(number: int) -> None:
                    async with turns:
                        await read(number)

                async def read(number: int) -> None:
                    question, at = f"Number {number}?", chance.randrange(2)
                    reader = _reader(number, question)
                    while reader.ended is None:
                        with suppress(httpx.TransportError):
                            await reader.read(clients[at])
                        at = 1 - at
                    whole = _reader(number, question)
                    whole.run = reader.run
                    await whole.whole(gateways[at].client)
                    assert (reader.text, reader.raw) == (told.text(question), whole.raw), question
                    url, key = f"{reader.path}/{reader.run}", {"authorization": "Bearer another"}
                    assert (await gateways[at].client.get(url, headers=key)).status_code == 404, url

                await asyncio.gather(*map(read_in_turn, range(streams)))
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
    print(f"{streams} streams with {cuts} cuts: all bytes as without, 404 for another key, in {seconds:.0f} s.")


if __name__ == "__main__":
    main()
