"""HAProxy and Envoy as they are configured in deploy/, with their real binaries: nothing is held back, nothing lost."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from llmops.errors import ServerError
from tests.support.balancers import Balancer, balancer, envoy, haproxy
from tests.support.scripted_triton import ScriptedTriton, Step
from tests.support.servers import refuses
from tests.support.stack import gateway
from tests.support.waiting import GENEROUS, eventually

STREAMS = 100


@contextlib.asynccontextmanager
async def behind(
    make: Balancer, folder: Path, addresses: list[str], control: str = "127.0.0.1:9"
) -> AsyncIterator[httpx.AsyncClient]:
    """The client of a balancer that has found a gateway."""
    with contextlib.ExitStack() as running:
        try:
            url = running.enter_context(balancer(make, folder, addresses, control))
        except ServerError as error:
            pytest.skip(str(error))
        async with httpx.AsyncClient(base_url=url, timeout=GENEROUS, limits=httpx.Limits()) as client:
            await health(client, 200)
            yield client


async def health(client: httpx.AsyncClient, status: int) -> None:
    """Wait until the proxy says so of itself."""

    async def is_so() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return (await client.get("/proxy/health")).status_code == status
        return False

    await eventually(is_so, f"the proxy's health is {status}")


class Upstream:
    """A gateway that sends its second event only when the client has said that it has the first."""

    def __init__(self) -> None:
        self.seen = asyncio.Event()
        self.healthy = True
        self.got: list[str] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = re.search(r"content-length: (\d+)", head, re.I)
                await reader.readexactly(int(length[1]) if length else 0)
                if head.startswith("GET"):
                    self.got.append(head.split()[1])
                    status = b"200 OK" if self.healthy else b"503 No"
                    writer.write(b"HTTP/1.1 %s\r\ncontent-length: 0\r\n\r\n" % status)
                    continue
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
                writer.write(b"7\r\nfirst\n\n\r\n")
                await self.seen.wait()
                writer.write(b"8\r\nsecond\n\n\r\n0\r\n\r\n")


both = pytest.mark.parametrize("make", [haproxy, envoy])


@both
async def test_no_event_waits_for_the_next(make, tmp_path):
    upstream = Upstream()
    async with upstream.running() as address, behind(make, tmp_path, [address, "127.0.0.1:9"]) as client:
        received = b""
        async with client.stream("POST", "/v1/chat/completions", json={}) as response:
            async for part in response.aiter_raw():
                received += part
                if b"first" in received:
                    upstream.seen.set()
        assert received.split() == [b"first", b"second"]


@both
async def test_administration_and_costs_are_control_s(make, tmp_path):
    upstream, control = Upstream(), Upstream()
    paths = ("/api/usage?period=day", "/v1/organization/costs", "/v1/models")
    async with (
        upstream.running() as address,
        control.running() as own,
        behind(make, tmp_path, [address, "127.0.0.1:9"], own) as client,
    ):
        for path in paths:
            assert (await client.get(path)).status_code == 200
    asked = [[path for path in one.got if path != "/health/ready"] for one in (control, upstream)]
    assert asked == [list(paths[:2]), [paths[2]]]


@both
async def test_the_proxy_is_healthy_as_long_as_a_gateway_is(make, tmp_path):
    upstream = Upstream()
    async with upstream.running() as address, behind(make, tmp_path, [address, "127.0.0.1:9"]) as client:
        upstream.healthy = False
        await health(client, 503)


@both
async def test_a_gateway_that_ends_loses_no_stream(make, tmp_path, card):
    """SIGTERM under load: its streams are finished by it, and new requests by the other, all of them."""
    going_on = asyncio.Event()
    triton = ScriptedTriton(card, lambda tensors: two_tokens(going_on))
    await triton.start()
    settings = tmp_path / "gateway.yaml"
    settings.write_text("limits: {connections_per_client: 0}\n")
    with contextlib.ExitStack() as running:
        started = [gateway(f"127.0.0.1:{triton.port}", "--config", str(settings), forked=True) for _ in range(2)]
        fronts = [await asyncio.to_thread(running.enter_context, one) for one in started]
        addresses = [front.address.removeprefix("http://").removesuffix("/v1") for front in fronts]
        async with behind(make, tmp_path, addresses) as client:
            streams = [asyncio.create_task(stream(client)) for _ in range(STREAMS)]
            await eventually(lambda: triton.active == STREAMS)
            held = await asyncio.to_thread(fronts[0].metric, r"llmops_active_streams\{")
            assert 0 < held < STREAMS
            os.kill(fronts[0].pid, signal.SIGTERM)
            await eventually(lambda: refuses(int(addresses[0].rpartition(":")[2])))
            later = [asyncio.create_task(stream(client)) for _ in range(20)]
            # one that has ended by now says why below
            reached = len(streams) + len(later)
            await eventually(lambda: triton.active == reached or any(one.done() for one in [*streams, *later]))
            going_on.set()
            answers = await asyncio.gather(*streams, *later)
        assert [answer for answer in answers if answer != "[DONE]"] == []
    await triton.stop()


async def two_tokens(going_on: asyncio.Event) -> AsyncIterator[Step]:
    yield Step((5,))
    await going_on.wait()
    yield Step((6,))
    yield Step(final=True)


async def stream(client: httpx.AsyncClient) -> str:
    """The last that came of a stream, or what went wrong."""
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 2, "ignore_eos": True, "stream": True}
    lines = []
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines() if line]
    except httpx.HTTPError as error:
        return f"{type(error).__name__} {error} after {lines}"
    return lines[-1].removeprefix("data: ")
