"""The access log: one line of JSON per answer, whatever clients send."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.errors import ResourceError
from llmops.gateway.app import create_app
from llmops.gateway.http import telemetry_checks
from llmops.gateway.http.middleware import Check
from llmops.gateway.interfaces import Caller, Outcome, Usage
from llmops.gateway.settings import GatewaySettings
from llmops.gateway.telemetry import metric_definitions
from llmops.gateway.telemetry.access_log import AccessLogFile, format_line
from llmops.gateway.telemetry.request_timeline import FinishedRequest
from tests.support.gateway_stack import running
from tests.support.scripted_triton import Step
from tests.support.waiting import eventually

AT = datetime(2026, 3, 1, 12, 30, 0, 250_000, UTC).timestamp()


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(telemetry_checks, "LOG_FLUSH_INTERVAL", 0.01)


class Acme(Check):
    """A check that treats every request as if it had a key of that tenant."""

    async def before(self, scope, context) -> None:
        context.caller = Caller('ac"me\n', "ann@example.org", "key-7", "acme/key-7")


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_each_answer_is_a_line_that_says_how_it_went(card, tokenizer, tmp_path):
    path = tmp_path / "access.log"
    async with running(card, tokenizer, checks=[Acme()], access_log=str(path)) as stack:
        ids = stack.say("Hello world!", wait=0.01)
        headers = {"x-request-id": "mine", "authorization": "Bearer sk-secret"}
        answer = await stack.client.post("/v1/chat/completions", json=stack.chat_body, headers=headers)
        stack.steps(Step((5,)), Step(error="out of memory"))
        await stack.events()
        for path_ in ("/health/live", "/metrics", "/nothing%0D%0Ahere"):
            await stack.client.get(path_)
        await stack.client.post("/v1/embeddings", json={"model": "none", "input": "France"})
        await eventually(lambda: path.exists() and len(path.read_text().splitlines()) == 4)
    good, broken, lost, refused = read(path)
    usage = answer.json()["usage"]
    duration, ttft, tpot = (good.pop(name) for name in ("duration_ms", "ttft_ms", "tpot_ms"))
    assert 10 <= ttft <= duration
    assert 0 < tpot * (len(ids) - 1) <= duration - ttft + 0.1
    assert datetime.fromisoformat(good.pop("time")).tzinfo == UTC
    assert good == {
        "request_id": "mine", "trace_id": None, "route": "/v1/chat/completions", "status": 200, "outcome": "good",
        "finish": "stop", "model": "tiny", "tenant": 'ac"me\n', "key": "key-7",
        "prompt_tokens": usage["prompt_tokens"], "cached_tokens": None,
        "completion_tokens": usage["completion_tokens"], "replica": None, "continued": None,
    }  # fmt: skip
    assert (broken["status"], broken["outcome"], broken["finish"]) == (200, "failed", "error")
    assert (lost["status"], lost["route"], lost["model"]) == (404, None, None)
    assert (refused["status"], refused["route"]) == (404, "/v1/embeddings")
    for secret in ("France", "Hello", "sk-secret", "nothing", "example.org"):
        assert secret not in path.read_text()


_text = st.text(max_size=20) | st.sampled_from(['\n{"status":200}', "\r\n", "\x1b[2J", "\x7f\x9b", "\u202e\u2028"])


@given(request_id=_text, route=_text, tenant=_text, model=_text, finish=_text)
def test_nothing_that_a_client_chooses_makes_a_second_line(request_id, route, tenant, model, finish):
    outcome = Outcome(200, finish, Usage(1, 2))
    line = format_line(FinishedRequest(AT, 1.0, 1.5, request_id, route, Caller(tenant), model, outcome, {}))
    assert (line.isascii(), line[:-1].isprintable(), line[-1]) == (True, True, "\n")
    told = json.loads(line)
    assert told["time"] == "2026-03-01T12:30:00.250+00:00"
    assert (told["request_id"], told["duration_ms"]) == (request_id, 500)
    assert [told[name] or "" for name in ("route", "tenant", "model", "finish")] == [route, tenant, model, finish]


def one(request_id: str) -> FinishedRequest:
    return FinishedRequest(AT, 1.0, 1.5, request_id, "/", Caller(), "", Outcome(200), {})


def test_several_processes_write_whole_lines_and_a_file_that_was_moved_is_made_again(tmp_path):
    path = tmp_path / "access.log"
    files = {"a": AccessLogFile(str(path)), "b": AccessLogFile(str(path))}
    for name, file in files.items():
        file.write([one(f"{name}{at}") for at in range(100)])
    path.rename(tmp_path / "old")
    for name, file in files.items():
        file.write([one(f"{name}100")])
        file.close()
    assert ([line["request_id"] for line in read(path)], len(read(tmp_path / "old"))) == (["a100", "b100"], 200)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_pipe_gets_pieces_that_no_other_writer_can_tear(monkeypatch):
    """POSIX keeps together what is at most PIPE_BUF long."""
    pieces: list[bytes] = []
    monkeypatch.setattr(os, "write", lambda file, piece: pieces.append(piece) or len(piece))
    AccessLogFile("-").write([one(f"a{at}") for at in range(100)])
    assert len(pieces) > 1
    assert all(len(piece) <= 4096 and piece.endswith(b"\n") for piece in pieces)
    assert sum(piece.count(b"\n") for piece in pieces) == 100


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path):
    with pytest.raises(ResourceError) as failed:
        create_app(GatewaySettings(access_log=str(tmp_path / "none" / "access.log")))
    assert "No such file or directory" in failed.value.message
    assert "access_log" in failed.value.message


async def test_a_full_disk_costs_lines_and_nothing_else(card, tokenizer):
    async with running(card, tokenizer, access_log="/dev/full") as stack:
        stack.say("Hello")
        assert (await stack.chat()).status_code == 200

        def dropped() -> float:
            exports = stack.server.config.app.state.metrics.numbers(metric_definitions.TELEMETRY_EXPORTS)
            return exports.labels("access_log", "dropped").read()

        await eventually(lambda: dropped() == 1)
        assert (await stack.chat()).status_code == 200
