"""Attack: a stranger makes the gateway write log lines."""

import io
import json
import logging
import os
import re
import signal
import time
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest
import yaml

from llmops.gateway.conversations.response_store import ResponseRecord
from llmops.gateway.errors import OverloadedError, UnavailableError, log_detail
from llmops.gateway.logging_setup import REQUEST_LINES, RepeatedTracebacks, current_request
from tests.attacks.harness import LIVE, exchange, posted, record, scaled, status
from tests.attacks.test_stored_responses import away
from tests.gateway.test_conversations import chats
from tests.support.forked_cli import ForkedProcess
from tests.support.gateway_stack import running
from tests.support.waiting import GENEROUS, eventually

__all__ = ["chats"]

#: Bytes of log for one kind of request, however many come: a few lines each ten seconds.
LOG_BYTES = 4096

KINDS = {
    "invalid": b"\x16\x03\x01\x02\x00",
    "upgrade": b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: upgrade, close\r\nupgrade: websocket\r\n\r\n",
    "h2c": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "connect": b"CONNECT example.com:443 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "large header": b"GET / HTTP/1.1\r\nx: " + b"x" * 66_000,
    "many fields": b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 300 + b"\r\n",
    "odd target": b"GET //[ HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "no method": b"GE\x00 / HTTP/1.1\r\n\r\n",
    "body that is none": b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 1\r\nconnection: close\r\n\r\n{",
    "length of many zeros": b"POST /v1/completions HTTP/1.1\r\ncontent-length: %b1\r\nconnection: close\r\n\r\n{"
    % (b"0" * 5000),
    "unknown model": b"POST /v1/completions HTTP/1.1\r\ncontent-length: 26\r\nconnection: close\r\n\r\n"
    b'{"model":"x","prompt":"x"}',
    "no path": b"GET /%b HTTP/1.1\r\nconnection: close\r\n\r\n" % (b"x" * 1000),
}


def test_requests_write_few_lines(start):
    gateway = start()
    for kind, request in KINDS.items():
        exchange(gateway, request)
        before, sent, began = gateway.log_bytes, 0, time.monotonic()
        while sent < scaled(100, 20_000) and time.monotonic() - began < scaled(3, 20):
            exchange(gateway, request)
            sent += 1
        grown, seconds = gateway.log_bytes - before, time.monotonic() - began
        record(f"{kind}: {sent} requests in {seconds:.1f} s, {grown} bytes of log, {grown / sent:.0f} each")
        assert gateway.alive, kind
        assert grown < LOG_BYTES, kind


@pytest.mark.parametrize("workers", [1, 2])
def test_a_reader_of_the_log_that_stands_still_stops_no_answer(engine, tmp_path, workers):
    """Before the fix, the first line of the log that did not fit into the pipe stopped all answers."""
    config = tmp_path / "gateway.yaml"
    settings = {"triton": engine.address, "port": 0, "workers": workers, "responses": {"entries": 0}}
    config.write_text(yaml.safe_dump(settings))
    process = ForkedProcess(["gateway", "--config", str(config)], os.environ)
    try:
        read = b""
        while not (found := re.search(rb"listens on http://(\S+):(\d+)", read)):
            read += os.read(process.stdout.fileno(), 65536)
        gateway = SimpleNamespace(host=found[1].decode(), port=int(found[2]))
        while status(gateway, b"GET /health/ready HTTP/1.1\r\nhost: x\r\n\r\n") != 200:
            time.sleep(0.05)
        pipe = os.open(f"/proc/{process.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
        for size in 4096, 1:
            with suppress(BlockingIOError):
                while True:
                    os.write(pipe, b"." * size)
        os.close(pipe)
        for _ in range(10):
            assert exchange(gateway, KINDS["invalid"]).startswith(b"HTTP/1.1 400")
            assert status(gateway, LIVE) == 200
            chat = posted("/v1/completions", {"model": "tiny", "prompt": "Hello", "max_tokens": 4})
            assert status(gateway, chat) == 200
        began = time.monotonic()
        process.terminate()
        assert process.wait(GENEROUS) == 0
        record(f"the gateway ended {time.monotonic() - began:.1f} s after SIGTERM")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)


async def test_an_answer_that_fails_after_its_beginning_writes_one_line(chats, monkeypatch, caplog):
    """Parallel exports of one owner wait for each other, until the store counts as away in mid-answer."""

    error = UnavailableError("Conversations cannot be read or written now; try again.", detail="TimeoutError")
    monkeypatch.setattr("llmops.gateway.api.conversations.export_line", Mock(side_effect=[b"{}\n", error]))
    for _ in range(2):
        await chats.client.post("/api/conversations", json={})
    with pytest.raises(httpx.RemoteProtocolError):
        await chats.client.get("/api/conversations/export")
    lines = [line for line in caplog.records if line.levelname in ("WARNING", "ERROR") and "event loop" not in line.msg]
    record(f"{sum(len(line.getMessage()) + len(line.exc_text or '') for line in lines)} bytes of log")
    assert len(lines) == 1
    assert lines[0].exc_info is None


def test_a_fault_that_a_request_repeats_shows_its_traceback_once_a_second():
    """Before the fix, a fault of 1.2 KB in each answer wrote 105 GB a day for one sequential client.

    Faults outside of requests are all shown: one of two failing outboxes was never named.
    """
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(RepeatedTracebacks())
    log = logging.Logger("attacked")
    log.addHandler(handler)

    def fail(kind: str, times: int) -> None:
        for number in range(times):
            for fault in ("{", "[]x"):
                try:
                    json.loads(fault)
                except ValueError:
                    log.exception("%s %d failed", kind, number)

    token = current_request.set("req-1")
    fail("Request", 500)
    current_request.reset(token)
    assert len(stream.getvalue()) < LOG_BYTES
    assert stream.getvalue().count("Request 0 failed") == 2
    fail("Outbox", 3)
    assert stream.getvalue().count("Outbox") == 6


@pytest.fixture
def impatient(monkeypatch):
    """The store is away for each request, and the log has one line about it."""
    monkeypatch.setattr("llmops.gateway.conversations.database.STORE_TIMEOUT", 0.0)
    monkeypatch.setattr(REQUEST_LINES, "_interval", 1000.0)


async def test_requests_that_wait_for_each_other_write_one_line(impatient, chats, caplog):
    answers = [await chats.client.get("/api/conversations") for _ in range(20)]
    assert {answer.status_code for answer in answers} == {503}
    lines = [line for line in caplog.messages if "cannot be read or written" in line]
    record(f"{sum(map(len, lines))} bytes of log for 20 requests")
    assert len(lines) == 1


async def test_a_provider_that_is_away_writes_one_line_a_second(card, tokenizer, caplog):
    """Before the fix, each request wrote a line of 230 bytes."""
    overflow = {"aliases": {"best": ["gone", "cloud/big"]}, "providers": {"cloud": {"url": "http://127.0.0.1:9/v1"}}}
    overflow["providers"]["cloud"]["tenants"] = ["*"]
    async with running(card, tokenizer, **overflow) as stack:
        began = time.monotonic()
        answers = [await stack.chat(model="best") for _ in range(20)]
    assert {answer.json()["error"]["code"] for answer in answers} == {"provider_unavailable"}
    lines = [line for line in caplog.messages if "The provider cloud" in line]
    assert 1 <= len(lines) <= 1 + (time.monotonic() - began)


async def test_background_answers_that_cannot_be_stored_write_one_line_a_second(
    card, tokenizer, tmp_path, monkeypatch, caplog
):
    """Before the fix, 300 answers whose clients left wrote 99 lines in a second."""
    tried: set[str] = set()

    def fails(row: ResponseRecord) -> bool:
        if not row.running:
            tried.add(row.id)
        return not row.running

    monkeypatch.setattr("llmops.gateway.conversations.chat_run.SAVE_INTERVAL", 0.05)
    monkeypatch.setattr("llmops.gateway.conversations.chat_run.MAX_STORE_OUTAGE", 0.1)
    away(monkeypatch, fails)
    async with running(card, tokenizer, store=f"sqlite:///{tmp_path}/store.db", open=True) as stack:
        began = time.monotonic()
        for _ in range(20):
            stack.say("42")
            body = {"model": "tiny", "input": "What is it?", "background": True}
            await stack.client.post("/v1/responses", json=body)
        await eventually(lambda: len(tried) == 20)
        await eventually(lambda: "was not stored, because" in caplog.text)
    for kind in ("is not stored yet", "was not stored, because"):
        lines = [line for line in caplog.messages if kind in line]
        record(f"{len(lines)} lines for 20 answers: {kind}")
        assert 1 <= len(lines) <= 1 + (time.monotonic() - began), kind


def test_errors_of_a_kind_write_one_line_a_second_and_name_only_requests_in_the_log(caplog):
    """Before the fix, 64 waiting grammars of a client wrote a line of each further request, 28 in a second."""
    claims = []
    for number in range(28):
        for kind in (OverloadedError, UnavailableError):
            token = current_request.set(f"req-{number}")
            error = kind("Try again later.", detail="64 new grammars are waiting")
            log_detail(error)
            log_detail(error)
            claims += [number] * ("The gateway's log has request" in error.public_message)
            current_request.reset(token)
    assert len(caplog.messages) == 2
    assert claims == [0, 0]
    REQUEST_LINES._last = {kind: (at - 1, omitted) for kind, (at, omitted) in REQUEST_LINES._last.items()}
    log_detail(OverloadedError("Try again later.", detail="64 new grammars are waiting"))
    assert caplog.messages[-1].endswith("(27 more since the last such line)")
