"""Clients that do not read, on the real Triton: the mock engine soon sends more than sockets hold."""

import asyncio
import json
import os
import re
import signal
import socket
import urllib.request

import pytest

from tests.steps.test_faults import GENEROUS, active, until

pytestmark = pytest.mark.xdist_group("stack")


class Client:
    """One streamed completion over a bare socket with a small receive buffer, read when the test says so."""

    def __init__(self, url: str, tokens: int) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.settimeout(GENEROUS)
        self._socket.connect((host, int(port)))
        body = {"model": "mock", "prompt": "Go", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        data = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
        self._socket.sendall(head.encode() + data)

    def read(self) -> list[dict | str]:
        """The data of all events, to the end of the connection."""
        parts = []
        try:
            while part := self._socket.recv(65536):
                parts.append(part)
        except ConnectionResetError:
            pass
        finally:
            self._socket.close()
        return [_data(line) for line in re.findall(rb"^data: (.*)$", b"".join(parts), re.MULTILINE)]


def _data(line: bytes) -> dict | str:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return line.decode()


def texts(events: list) -> list[str]:
    return [choice["text"] for event in events if isinstance(event, dict) for choice in event.get("choices", ())]


def metric(url: str, name: str) -> float:
    page = urllib.request.urlopen(url + "/metrics", timeout=GENEROUS).read().decode()
    found = re.search(rf'^{name}{{model="mock"}} (\S+)$', page, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def test_a_slow_client_gets_every_token_late_and_in_fewer_events(mock_triton, start_gateway):
    tokens = 6000
    url = (await asyncio.to_thread(start_gateway, mock_triton.grpc_address)).url
    slow = Client(url, tokens)
    quick = await asyncio.to_thread(Client(url, tokens).read)
    # the quick one went on to its end although the slow one has read nothing
    await asyncio.sleep(0.5)
    late = await asyncio.to_thread(slow.read)
    assert "".join(texts(late)) == "".join(texts(quick))
    assert [events[-1] for events in (quick, late)] == ["[DONE]", "[DONE]"]
    assert [events[-2]["usage"]["completion_tokens"] for events in (quick, late)] == [tokens, tokens]
    # what the sockets could not hold was put together meanwhile
    assert len(late) < 0.8 * len(quick)


async def test_a_client_that_reads_nothing_for_too_long_is_dropped(mock_triton, start_gateway):
    gateway = await asyncio.to_thread(start_gateway, mock_triton.grpc_address, LLMOPS_TIMEOUTS__CLIENT="1s")
    client = Client(gateway.url, 200_000)
    await until(1, metric, gateway.url, "llmops_active_streams")
    await until(0, metric, gateway.url, "llmops_active_streams")
    assert metric(gateway.url, "llmops_cancelled_requests_total") == 1
    events = await asyncio.to_thread(client.read)
    assert texts(events)
    assert "[DONE]" not in events


async def test_a_gateway_that_is_stopped_for_too_long_loses_its_requests_and_says_so_once(mock_triton, start_gateway):
    """The window of 256 steps is full after a quarter of a second, and the grace time is five."""
    gateway = await asyncio.to_thread(start_gateway, mock_triton.grpc_address)
    clients = [Client(gateway.url, 200_000) for _ in range(4)]
    await until(4, active, mock_triton.metrics_url)
    os.kill(gateway.process.pid, signal.SIGSTOP)
    await until(0, active, mock_triton.metrics_url)
    os.kill(gateway.process.pid, signal.SIGCONT)
    for events in await asyncio.gather(*(asyncio.to_thread(client.read) for client in clients)):
        errors = [event["error"]["code"] for event in events if isinstance(event, dict) and "error" in event]
        assert errors == ["engine_unavailable"]
        assert "[DONE]" not in events
    assert (await asyncio.to_thread(Client(gateway.url, 10).read))[-1] == "[DONE]"
