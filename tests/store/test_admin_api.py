"""The admin API itself: who may use it, what it documents, what it refuses, what the audit log has of it."""

import asyncio
import json
import os
import re
import signal
from datetime import UTC, datetime
from functools import partial

import httpx
import pytest
from sqlalchemy import make_url

from llmops.control import api_route
from llmops.control.app import control_plugin
from llmops.control.store_access import SharedStore
from llmops.gateway.app import create_app as create_gateway
from llmops.gateway.settings import GatewaySettings
from llmops.store.accounts.key_secrets import hash_secret, is_secret
from llmops.store.dead_letters import DeadLetter, add_dead_letters
from llmops.store.factory import open_store
from tests.store.control_client import bearer, control, make_key
from tests.support.gateway_stack import app_client
from tests.support.processes import descendants
from tests.support.servers import Postgres
from tests.support.waiting import eventually

ONLY_SQLITE = pytest.mark.parametrize("kind", ["sqlite"])


def said(answer) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


@ONLY_SQLITE
async def test_every_route_refuses_without_a_key_and_administration_without_the_scope(url):
    plain, _, _ = await make_key(url, scopes=("inference", "usage", "metrics"))
    async with control(url) as client:
        app = client._transport.app
        routes = [(method, one.path) for one in app.routes for method in getattr(one, "methods", None) or ()]
        assert ("POST", "/api/admin/keys") in routes
        assert ("GET", "/api/usage") in routes
        for method, template in routes:
            path = re.sub(r"{.*?}", "x", template)
            stranger = await client.request(method, path)
            # which operations there are is in the documentation too, and the page has no content of its own
            open_to_all = template.startswith(("/health/", "/docs", "/redoc", "/openapi.json", "/assets"))
            open_to_all |= template in ("/", "/admin")
            assert (stranger.status_code == 401) != open_to_all, (method, template)
            if template.startswith("/api/admin"):
                refused = await client.request(method, path, headers=bearer(plain))
                assert said(refused)[:2] == (403, "insufficient_permissions")


async def test_a_tenant_from_nothing_to_a_key(url):
    admin, admin_id, _ = await make_key(url)
    async with control(url, key=admin) as client:
        budget = {"usd": 500, "period": "month"}
        made = await client.post("/api/admin/tenants", json={"id": "acme", "rpm": 1000, "budget": budget})
        assert made.status_code == 201
        assert made.json()["budget"] == {"usd": 500.0, "micros": 500_000_000, "period": "month"}
        key = await client.post("/api/admin/keys", json={"tenant": "acme", "user": "ann@acme.example", "tpm": 9})
        secret, key_id = key.json()["key"], key.json()["id"]
        assert is_secret(secret)
        # the secret has no place in a path; its hash calls the key as well
        shown = await client.get(f"/api/admin/keys/{hash_secret(secret)}")
        assert (shown.json()["id"], shown.json()["tpm"], shown.json()["tenant_limits"]["rpm"]) == (key_id, 9, 1000)
        # what is not named stays, null takes away
        changed = await client.patch(f"/api/admin/keys/{key_id}", json={"rpm": 5})
        assert (changed.json()["rpm"], changed.json()["tpm"]) == (5, 9)
        changed = await client.patch(f"/api/admin/keys/{key_id}", json={"tpm": None, "budget": shown.json()["budget"]})
        assert (changed.json()["rpm"], changed.json()["tpm"]) == (5, None)
        rotated = await client.post(f"/api/admin/keys/{key_id}/rotate", json={"overlap_seconds": 60})
        assert rotated.json()["key"] != secret
        own = [await client.get("/api/usage", headers=bearer(one)) for one in (secret, rotated.json()["key"])]
        assert [answer.status_code for answer in own] == [200, 200]
        price = {"model": "tiny", "input": 0.6, "output": 0.9, "from": "2100-01-01"}
        assert (await client.post("/api/admin/prices", json=price)).json()["id"] == "tiny@2100-01-01T00:00:00Z"
        log = (await client.get("/api/admin/audit", params={"action": "key.", "limit": 4})).json()
    assert {line["actor"] for line in log} == {f"key:{admin_id}"}
    assert [line["action"] for line in log] == ["key.rotate", "key.update", "key.update", "key.create"]
    assert secret not in json.dumps(log)


async def test_a_list_of_many_keys_has_each_once(url, monkeypatch):
    """The event loop makes a page at a time: 20,000 keys held it for 1.9 s."""
    monkeypatch.setattr(api_route, "PAGE_SIZE", 2)
    secret, admin, _ = await make_key(url)
    async with control(url, key=secret) as client:
        assert (await client.post("/api/admin/tenants", json={"id": "acme"})).status_code == 201
        made = []
        for number in range(7):
            key = {"tenant": "acme", "user": f"{number % 3}@acme.example", "budget": {"usd": 5, "period": "day"}}
            made.append((await client.post("/api/admin/keys", json=key)).json())
        await client.post(f"/api/admin/keys/{made[0]['id']}/revoke", json={})
        listed = (await client.get("/api/admin/keys")).json()
        shown = [{name: value for name, value in one.items() if name != "key"} for one in made]
        assert listed[:-1] == [shown[number] for number in (3, 6, 1, 4, 2, 5)]
        assert listed[-1]["id"] == admin
        every = (await client.get("/api/admin/keys", params={"all": True, "tenant": "acme"})).json()
        assert [key["id"] for key in every] == [made[number]["id"] for number in (0, 3, 6, 1, 4, 2, 5)]
        user = (await client.get("/api/admin/keys", params={"user": "1@acme.example"})).json()
        assert [key["id"] for key in user] == [made[number]["id"] for number in (1, 4)]
        log = (await client.get("/api/admin/audit", params={"action": "key."})).json()
        assert [line["subject"] for line in log[:8]] == [made[number]["id"] for number in (0, 6, 5, 4, 3, 2, 1, 0)]
        assert (await client.get("/api/admin/audit", params={"action": "key.", "limit": 5})).json() == log[:5]
        letters = [DeadLetter("not signed by a gateway", "t[0] at 1", b"%d" % number) for number in range(7)]
        async with await open_store(url) as store:
            for day in (1, 2):
                at = datetime(2026, 1, day, tzinfo=UTC)
                await store.transact(partial(add_dead_letters, parked=letters[3 * day :], at=at))
        parked = (await client.get("/api/admin/usage/dead-letters", params={"limit": 3})).json()
        assert {line["value"] for line in parked[:1]} == {"6"}
        assert len({line["value"] for line in parked}) == len(parked) == 3


NOT_JSON = "The body is not a valid JSON object; send one, with names and texts in double quotes."
BAD = [
    ("POST", "/tenants", b"{", 400, NOT_JSON),
    ("POST", "/tenants", b"[]", 400, NOT_JSON),
    ("POST", "/tenants", b'{"id": "\xff"}', 400, NOT_JSON),
    ("POST", "/tenants", b"[" * 60_000, 400, NOT_JSON),
    ("POST", "/tenants", {}, 400, "Missing required parameter: 'id'. Add it to the request."),
    ("POST", "/tenants", {"id": "zeta", "rmp": 5}, 400, "Invalid value for 'rmp': it is unknown."),
    ("POST", "/tenants", {"id": "zeta", "rpm": -1}, 400, "rpm cannot be -1: a limit is 1 to 1,000,000,000;"),
    ("POST", "/keys", {"tenant": "ops", "user": "x@y.example", "tier": "x" * 600}, 400, "is not a tier; write"),
    ("POST", "/tenants", {"id": "zeta", "rpm": 0}, 400, "rpm cannot be 0: a limit is 1 to"),
    ("POST", "/tenants", {"id": "zeta", "tpm": 10**30}, 400, "a limit is 1 to"),
    ("POST", "/tenants", {"id": "zeta", "rpm": "many"}, 400, "Invalid value for 'rpm'"),
    ("POST", "/tenants", {"id": "zeta", "budget": 50}, 400, "Invalid value for 'budget'"),
    ("POST", "/tenants", {"id": "zeta", "budget": {"period": "day"}}, 400, "a budget needs an amount"),
    ("POST", "/tenants", {"id": "zeta", "budget": {"eur": 5, "period": "day"}}, 400, "Invalid value for 'budget"),
    ("POST", "/tenants", {"id": "zeta", "budget": {"usd": 5, "period": "year"}}, 400, "Invalid value for 'budget.per"),
    ("POST", "/tenants", {"id": "zeta", "budget": {"usd": -5, "period": "day"}}, 400, "Invalid value for 'budget.usd"),
    ("POST", "/tenants", {"id": "zeta", "budget": {"usd": 0, "period": "day"}}, 400, "A budget is more than $0"),
    ("POST", "/tenants", {"id": "zeta", "budget": {"usd": 1, "micros": 5, "period": "day"}}, 400, "same amount"),
    ("POST", "/tenants", {"id": "Zeta"}, 400, "'Zeta' cannot name a tenant"),
    ("POST", "/tenants", {"id": "ops"}, 409, "The tenant ops already exists; `llmops tenant update ops` changes it."),
    ("PATCH", "/tenants/nobody", {"rpm": 5}, 404, "There is no tenant nobody; "),
    ("DELETE", "/tenants/nobody", None, 404, "There is no tenant nobody; "),
    ("POST", "/keys", {"tenant": "ops", "user": "a@b", "scopes": ["root"]}, 400, "There is no scope root"),
    ("POST", "/keys", {"tenant": "ops", "user": "a@b", "name": "a\0b"}, 400, "the text has a control character"),
    ("POST", "/keys", {"tenant": "ops", "user": "a@b", "expires_at": "2020-01-01"}, 400, "cannot expire in the past"),
    ("POST", "/keys", {"tenant": "ops", "user": "x" * 70_000}, 413, "accepts (65536 bytes); shorten it."),
    ("GET", "/keys/key-none", None, 404, "There is no key key-none; "),
    ("GET", "/keys/%00", None, 400, "the text has a control character"),
    ("POST", "/keys/key-none/rotate", {"overlap_seconds": -1}, 400, "Invalid value for 'overlap_seconds'"),
    ("POST", "/prices", {"model": "m", "input": "free", "output": 1}, 400, "Invalid value for 'input'"),
    ("POST", "/prices", {"model": "m", "input": 1e-9, "output": 1}, 400, "Invalid value for 'input'"),
    ("POST", "/prices", {"model": "m", "input": 1, "output": 2e6}, 400, "A price is $0 to $1,000,000 per million"),
    ("POST", "/prices", b'{"model": "m", "input": NaN, "output": 1}', 400, "Invalid value for 'input'"),
    ("POST", "/prices", {"model": "m", "input": 1, "output": 1, "from": "2020-01-01"}, 400, "cannot begin in the past"),
    ("GET", "/usage?by=color", None, 400, "Invalid value for 'by"),
    ("GET", "/usage?from=2026-02-02&to=2026-02-01", None, 400, "ends before it begins"),
    ("GET", "/usage?tenant=zeta", None, 404, "There is no tenant zeta; "),
    ("POST", "/keys", b'{"tenant": "ops", "user": "a@b", "name": "\\ud800"}', 400, "Invalid value for 'name'"),
    ("POST", "/keys", {"tenant": "ops", "user": "a@b", "expires_at": "9999-12-31T23:59:59-14:00"}, 400, "the years 1"),
    ("GET", "/audit?since=0001-01-01T00:00:00%2B14:00", None, 400, "this time is outside the years 1 to 9999"),
    ("GET", "/audit?limit=0", None, 400, "Invalid value for 'limit'"),
]  # fmt: skip


async def test_of_two_changes_at_once_neither_is_undone(url):
    """Before the fix, PostgreSQL lost 25 of 30, so that a key kept a scope which an admin had removed."""
    admin, _, _ = await make_key(url)
    async with control(url, key=admin) as client:
        await client.post("/api/admin/tenants", json={"id": "acme"})
        body = {"tenant": "acme", "user": "ann@acme.example", "scopes": ["inference", "admin"]}
        for number in range(5):
            key = f"/api/admin/keys/{(await client.post('/api/admin/keys', json=body)).json()['id']}"
            changes = {"scopes": ["inference"]}, {"name": "ann"}, {"rpm": number + 1}
            await asyncio.gather(*(client.patch(key, json=change) for change in changes))
            found = (await client.get(key)).json()
            assert (found["scopes"], found["name"], found["rpm"]) == (["inference"], "ann", number + 1)
            limits = {"rpm": number + 1}, {"tpm": number + 1}
            await asyncio.gather(*(client.patch("/api/admin/tenants/acme", json=limit) for limit in limits))
            found = (await client.get("/api/admin/tenants/acme")).json()
            assert (found["rpm"], found["tpm"]) == (number + 1, number + 1)


async def test_what_cannot_be_is_refused_in_one_sentence_and_changes_nothing(url):
    admin, _, _ = await make_key(url)
    async with control(url, key=admin) as client:
        before = (await client.get("/api/admin/audit")).json()
        for method, path, body, status, sentence in BAD:
            content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
            answer = await client.request(method, f"/api/admin{path}", content=content)
            assert (answer.status_code, sentence in said(answer)[2]) == (status, True), (path, body, answer.text)
        assert (await client.get("/api/admin/audit")).json() == before


async def test_a_store_that_is_away_is_503_its_place_is_for_the_log_and_it_comes_back(own_postgres, caplog):
    server, stop, start = own_postgres
    admin, _, _ = await make_key(server)
    async with control(server, key=admin) as client:
        assert (await client.get("/api/admin/tenants")).is_success
        stop()
        away = await client.post("/api/admin/tenants", json={"id": "zeta"})
        assert said(away)[:2] == (503, "store_unavailable")
        assert "127.0.0.1" not in away.text
        assert (await client.get("/health/ready")).status_code == 503
        start()
        assert (await client.post("/api/admin/tenants", json={"id": "zeta"})).status_code == 201
    assert "127.0.0.1" in caplog.text
    assert make_url(server).password not in caplog.text


async def test_a_store_that_hangs_is_503(monkeypatch):
    """Before the fix, reports waited for as long as it hung, and control was ready."""
    monkeypatch.setattr("llmops.control.store_access.STORE_TIMEOUT", 0.5)
    with Postgres() as server:
        admin, _, _ = await make_key(server.url)
        async with control(server.url, key=admin) as client:
            assert (await client.get("/api/usage")).status_code == 200
            pids = descendants(server.pid)
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            hanging = [await client.get(path) for path in ("/health/ready", "/api/usage")]
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            assert [said(answer)[:2] for answer in hanging] == [(503, "store_unavailable")] * 2
            await eventually(lambda: is_ready(client))


async def is_ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/health/ready")).status_code == 200


@ONLY_SQLITE
async def test_health_checks_of_strangers_share_a_read_of_the_store(url, monkeypatch):
    """Before the fix, each took a connection to the store: under 700 of them, others waited for 415 ms, not 55."""
    reads, read = [], SharedStore.read
    monkeypatch.setattr(SharedStore, "read", lambda store: reads.append(store) or read(store))
    async with control(url) as client:
        answers = await asyncio.gather(*(client.get("/health/ready") for _ in range(100)))
    assert {answer.status_code for answer in answers} == {200}
    assert len(reads) <= 10


@ONLY_SQLITE
async def test_a_gateway_has_it_behind_its_own_door_only_as_a_guest(url):
    admin, _, _ = await make_key(url)
    settings = GatewaySettings(triton="127.0.0.1:1", store=url)
    alone, with_guest = create_gateway(settings), create_gateway(settings, plugins=[control_plugin(settings, tuple)])
    # the gateway's own are those of the chat page
    others = ("/api/usage", "/api/models", "/api/admin")
    assert not any(path.startswith(others) for path in alone.openapi()["paths"])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(alone), base_url="http://gateway") as client:
        for path in ("/api/usage", "/api/models", "/api/admin/keys", "/v1/organization/costs"):
            status, code, message = said(await client.get(path, headers=bearer(admin)))
            assert (status, code) == (404, "not_found")
            assert message.startswith(f"There is no GET {path}. It belongs to `llmops control`: start that,")
    document = with_guest.openapi()
    assert {"/api/usage", "/api/models", "/v1/organization/costs", "/api/admin/keys"} <= set(document["paths"])
    assert {"KeyCreate", "ChatRequest"} <= set(document["components"]["schemas"])
    async with app_client(with_guest) as client:
        assert (await client.get("/api/usage")).status_code == 401
        client.headers.update(bearer(admin))
        assert (await client.post("/api/admin/tenants", json={"id": "zeta"})).status_code == 201
        assert (await client.get("/api/usage")).json()["of"] == "key"
        # asked of itself, with the caller's key; there is no Triton here
        assert (await client.get("/api/models")).json() == {"object": "list", "data": []}
