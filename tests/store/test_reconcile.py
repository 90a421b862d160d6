"""The reconciler: what has not arrived, and what engines say that they served."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from dataclasses import replace
from datetime import timedelta

import pytest
from click.testing import CliRunner

from llmops.cli.main import cli
from llmops.control.admin.reconcile import ACTION, reconcile
from llmops.control.admin.schemas import EngineTokens, MissingEvents, ReconciliationRequest
from llmops.control.reconcile import Reconciler, served_tokens
from llmops.errors import ResourceError
from llmops.gateway.interfaces import UsageEvent
from llmops.gateway.usage.ledger_sink import LedgerSink
from llmops.store.audit import list_audit_entries

NOTHING = ReconciliationRequest()
PAGE = b"""# TYPE nv_llm_output_token_len histogram
nv_llm_output_token_len_bucket{le="10",model="tiny-tensorrt_llm",response_metric_type="total_output_tokens"} 1
nv_llm_output_token_len_sum{model="tiny-tensorrt_llm",response_metric_type="total_output_tokens",version="1"} 90
nv_llm_output_token_len_count{model="tiny-tensorrt_llm",response_metric_type="total_output_tokens"} 9
nv_llm_input_token_len_sum{model="tiny-tensorrt_llm",response_metric_type="total_input_tokens"} 1000
"""


def events(by, *numbers, gateway="gw-1"):
    return [
        UsageEvent(
            f"{gateway[-1] * 8}-0000-7000-8000-{seq:012x}", gateway, seq, by.at, "r", "", "", "", "tiny", 5, 0, 10
        )
        for seq in numbers
    ]


async def report(store, by, **served):
    async with store.write() as connection:
        return await reconcile(connection, by, ReconciliationRequest(served=served))


async def test_gaps_are_told_until_they_are_filled(store, url, by):
    sink = LedgerSink(url)
    await sink.write(events(by, 0, 1, 4, 5, 8))
    await sink.write(events(by, 0, 1, 2, gateway="gw-2"))
    first = await report(store, by)
    assert (first.gateways, first.missing) == (2, 4)
    expected = [MissingEvents(gateway="gw-1", first=a, last=b, since=by.at) for a, b in ((2, 3), (6, 7))]
    assert list(first.gaps) == expected
    later = replace(by, at=by.at + timedelta(hours=1))
    await sink.write(events(by, 2, 3))
    second = await report(store, later)
    # it is known since the first report
    assert (second.missing, list(second.gaps)) == (2, expected[1:])
    await sink.write(events(by, 6, 7))
    assert (await report(store, later)).missing == 0
    await sink.close()
    async with store.read() as connection:
        kept = await list_audit_entries(connection, action=ACTION)
    assert sorted(one.detail["missing"] for one in kept) == [0, 2, 4]


async def test_what_engines_served_since_the_last_report(store, url, by):
    sink = LedgerSink(url)
    await sink.write(events(by, 0, 1))
    hours = [replace(by, at=by.at + timedelta(hours=hour)) for hour in range(4)]
    told = (await report(store, hours[0], tiny=100)).engines
    assert told == (EngineTokens(model="tiny", served=100, billed=20),)
    await sink.write(events(by, 2, 3))
    # a report without engines in between changes nothing
    await report(store, hours[1])
    assert [one.unbilled for one in (await report(store, hours[2], tiny=123)).engines] == [3]
    # started again
    assert [one.unbilled for one in (await report(store, hours[3], tiny=7)).engines] == [None]
    await sink.close()


@pytest.fixture
def page():
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(PAGE)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()


async def test_tritons_page_is_read(page, monkeypatch):
    assert await served_tokens([page, page]) == {"tiny": 180}
    for other in (f"{page}/none", "http://127.0.0.1:9/metrics", "no url"):
        with pytest.raises(ResourceError, match="cannot be read"):
            await served_tokens([other])
    monkeypatch.setattr("llmops.control.reconcile.MAX_PAGE_BYTES", len(PAGE) - 1)
    with pytest.raises(ResourceError, match="cannot be read"):
        await served_tokens([page])


async def test_the_leader_says_what_is_missing(store, url, by, caplog):
    sink = LedgerSink(url)
    await sink.write(events(by, 0, 3))
    await sink.close()
    task = asyncio.create_task(Reconciler(url, interval=0.01).run())
    while not caplog.messages:
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert caplog.messages[0] == "2 usage events have not arrived, the first of gateway gw-1 with number 1."


def test_the_command(url, by, page):
    async def write(*numbers):
        sink = LedgerSink(url)
        await sink.write(events(by, *numbers))
        await sink.close()

    run = CliRunner().invoke
    told = run(cli, ["usage", "reconcile", "--store", url])
    assert (told.exit_code, told.output) == (0, "Missing: 0 events (gateway workers known: 0).\n")
    asyncio.run(write(0, 3))
    told = run(cli, ["usage", "reconcile", "--store", url, "--engine", page])
    assert told.exit_code == 1
    assert "gw-1" in told.output
    assert "1-2" in told.output
    assert "Missing: 2 events (gateway workers known: 1)" in told.output
    asyncio.run(write(1, 2))
    told = run(cli, ["usage", "reconcile", "--store", url, "--json"])
    assert told.exit_code == 0
    found = json.loads(told.output)
    assert (found["missing"], found["gaps"]) == (0, [])
    # and usage itself is as it was
    assert json.loads(run(cli, ["usage", "--store", url, "--json"]).output)["requests"] == 4
