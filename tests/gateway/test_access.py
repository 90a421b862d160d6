"""Keys at the gateway: who is refused and with what, what one tenant sees of another, what a store costs."""

import asyncio
import logging
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from llmops.gateway.app import create_app
from llmops.gateway.auth.authentication import Authentication, required_scopes
from llmops.gateway.settings import GatewaySettings
from llmops.store.accounts import keys as key_queries
from llmops.store.accounts.key_secrets import new_secret
from llmops.store.accounts.keys import require_key, revoke_key, rotate_key
from llmops.store.accounts.tenants import delete_tenant
from llmops.store.audit import AuditContext, AuditLogEntry, list_audit_entries
from llmops.store.database import Store
from llmops.store.factory import open_store
from tests.support.accounts import add_key
from tests.support.gateway_stack import BODIES, CHAT, MESSAGES, RESPONSES, running
from tests.support.scripted_triton import Step
from tests.support.waiting import GENEROUS

ALL_SCOPES = ("inference", "usage", "metrics", "admin")


@dataclass
class Accounts:
    """A store, and what an administrator does to it."""

    url: str
    store: Store
    ids: dict[str, str] = field(default_factory=dict)

    async def key(self, tenant: str = "acme", at: datetime | None = None, user: str = "", **spec) -> str:
        secret, self.ids[secret], _ = await add_key(self.store, tenant, user, self.by(at), **spec)
        return secret

    async def revoke(self, secret: str) -> None:
        async with self.store.write() as connection:
            await revoke_key(connection, secret, self.by())

    async def rotate(self, secret: str, overlap: timedelta, at: datetime | None = None) -> str:
        async with self.store.write() as connection:
            return await rotate_key(connection, await require_key(connection, secret), overlap, self.by(at))

    async def refusals(self) -> Sequence[AuditLogEntry]:
        async with self.store.read() as connection:
            return await list_audit_entries(connection, action="access.")

    async def delete_tenant(self, tenant: str) -> None:
        async with self.store.write() as connection:
            await delete_tenant(connection, tenant, self.by())

    def by(self, at: datetime | None = None) -> AuditContext:
        return AuditContext("cli:tester", at or datetime.now(UTC))


@pytest.fixture
async def accounts(tmp_path):
    url = f"sqlite:///{tmp_path}/store.db"
    async with await open_store(url) as store:
        yield Accounts(url, store)


@asynccontextmanager
async def asking(settings: GatewaySettings, add=lambda app: None):
    """The application with its store and no Triton, without a server."""
    app = create_app(settings)
    add(app)
    (access,) = (check for check in app._checks if isinstance(check, Authentication))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        try:
            yield client
        finally:
            await access.close()


def nowhere(accounts: Accounts, **settings) -> GatewaySettings:
    return GatewaySettings(triton="127.0.0.1:1", store=accounts.url, **settings)


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def said(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


# -- every route -----------------------------------------------------------------------------------------------------


async def text(request):
    return PlainTextResponse("text")


async def test_every_route_but_health_and_the_reference_refuses_without_a_key_also_one_added_later(accounts):
    await accounts.key()
    routes = []

    def add(app):
        app.add_api_route("/later/{name}", text, methods=["GET", "PUT"])
        app.router.post("/v1/later")(text)
        app.mount("/inner", Starlette(routes=[Route("/deep", text)]))
        routes.extend((method, one.path) for one in app.routes for method in getattr(one, "methods", None) or ())
        routes.append(("GET", "/inner/deep"))

    async with asking(nowhere(accounts), add) as client:
        assert ("POST", CHAT) in routes
        assert ("GET", "/metrics") in routes
        for method, template in routes:
            path = re.sub(r"{.*?}", "x", template)
            answers = [await client.request(method, path), await client.request(method, path, headers=bearer("x"))]
            if template in {"/docs", "/redoc", "/openapi.json", "/", "/admin", "/assets/{name:path}"}:
                # the API reference and the pages are the same in every deployment
                assert {answer.status_code for answer in answers} <= {200, 404}, (method, template)
                continue
            probe = template.startswith("/health")
            assert (answers[0].status_code != 401, answers[1].status_code) == (probe, 401), (method, template)
            for answer in answers[probe:]:
                assert answer.headers["www-authenticate"].startswith('Bearer realm="llmops"')
                assert answer.headers["x-should-retry"] == "false"


async def test_a_browser_keeps_its_key_in_a_cookie_that_only_the_page_can_use(accounts):
    key = await accounts.key()
    async with asking(nowhere(accounts)) as client:
        assert (await client.get("/", headers={"accept": "text/html"})).status_code == 200
        assert (await client.get("/api/session")).status_code == 401
        assert (await client.post("/api/session", headers=bearer("sk-llmops-" + "x" * 32))).status_code == 401
        signed_in = await client.post("/api/session", headers=bearer(key))
        assert signed_in.headers["set-cookie"].partition("; ")[2].lower() == "httponly; path=/; samesite=strict"
        assert (await client.get("/api/session")).json()["signed_in"]
        assert (await client.get("/api/conversations")).json()["data"] == []
        # another page in this browser
        for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
            assert (await client.delete("/api/conversations", headers=headers)).status_code == 403
        # the API and the administration take no cookie
        for path in (CHAT, "/v1/responses", "/v1/conversations"):
            assert (await client.post(path, json={})).status_code == 401, path
        assert (await client.delete("/api/session")).json()["signed_in"] is False
        assert (await client.get("/api/conversations")).status_code == 401


async def test_conversations_belong_to_the_user_of_a_key(accounts):
    ann, bob = [await accounts.key(user=f"{name}@acme.example", scopes=("inference",)) for name in ("ann", "bob")]
    admin = await accounts.key(user="eve@acme.example", scopes=("inference", "admin"))
    async with asking(nowhere(accounts)) as client:
        made = (await client.post("/api/conversations", json={"title": "Private"}, headers=bearer(ann))).json()
        for path in (f"/api/conversations/{made['id']}", f"/v1/conversations/{made['id']}"):
            assert (await client.get(path, headers=bearer(ann))).status_code == 200
            assert (await client.get(path, headers=bearer(bob))).status_code == 404
        everything = "/api/conversations/export?tenant=acme"
        assert (await client.get(everything, headers=bearer(bob))).status_code == 403
        assert "Private" in (await client.get(everything, headers=bearer(admin))).text
        assert (await client.get("/api/conversations/export?user=x", headers=bearer(admin))).status_code == 400
        assert (await client.delete("/api/conversations?user=x", headers=bearer(bob))).status_code == 403
        assert (await client.delete("/api/conversations?tenant=acme", headers=bearer(admin))).json()["deleted"] == 1


async def test_a_key_passes_where_its_scopes_reach(accounts):
    plain, metrics, everything = [
        await accounts.key(scopes=scopes) for scopes in (("inference", "usage"), ("metrics",), ALL_SCOPES)
    ]
    async with asking(nowhere(accounts)) as client:

        async def statuses(secret):
            paths = ("/", "/openapi.json", "/metrics", "/v1/models")
            return [(await client.get(path, headers=bearer(secret))).status_code for path in paths]

        found = [await statuses(one) for one in (plain, metrics, everything)]
        assert found == [[200, 200, 403, 200], [200, 200, 200, 403], [200, 200, 200, 200]]
        assert said(await client.get("/metrics", headers=bearer(plain))) == (
            403,
            "insufficient_permissions",
            "This API key does not have the scope 'metrics', which /metrics asks for; use a key that has this scope.",
        )
    paths = ("/api/admin/keys", "/api/usage", "/v1/organization/costs", "/replicas", "/new")
    scopes = [" or ".join(required_scopes(path)) for path in paths]
    assert scopes == ["admin", "usage or inference", "usage", "metrics or inference", "inference"]


# -- bad keys --------------------------------------------------------------------------------------------------------

PAST = datetime.now(UTC) - timedelta(days=2)
FOREIGN = (
    "The credential is not an API key of this gateway; an API key is sk-llmops- and 32 letters or digits. "
    "`llmops key create` makes one."
)
UNKNOWN = "This API key is not known here; check it for typing errors, and use a key of this deployment."


async def test_what_is_no_key_any_more_is_told_in_one_sentence_each(accounts, tmp_path):
    good = await accounts.key()
    expired = await accounts.key(at=PAST, expires_at=PAST + timedelta(days=1))
    revoked, gone = await accounts.key(), await accounts.key("gone")
    await accounts.revoke(revoked)
    await accounts.delete_tenant("gone")
    replaced = await accounts.key()
    await accounts.rotate(replaced, timedelta(hours=1), PAST)
    async with await open_store(f"sqlite:///{tmp_path}/staging.db") as other:
        staging = await Accounts("", other).key()
    cases = {
        good: None,
        new_secret(): UNKNOWN,
        staging: UNKNOWN,
        expired: "This API key has expired; use another.",
        revoked: "This API key was revoked; use another.",
        gone: "This API key was revoked; use another.",
        replaced: "This API key was rotated; use its new secret.",
        "sk-proj-abc": FOREIGN,
        good + "0": FOREIGN,
        good[:-1]: FOREIGN,
        good.upper(): FOREIGN,
        "ü" * 20: FOREIGN,
        "x" * 5000: FOREIGN,
    }
    async with asking(nowhere(accounts)) as client:
        for _ in range(2):  # looked up, and remembered
            for secret, told in cases.items():
                for headers in ({"authorization": f"Bearer {secret}".encode()}, {"x-api-key": secret.encode()}):
                    answer = await client.get("/v1/models", headers=headers)
                    assert answer.status_code == 200 if told is None else said(answer) == (401, "invalid_api_key", told)
        assert said(await client.get("/v1/models"))[2].startswith("No API key was sent; send one as `Authorization")
        for empty in ({"authorization": "Bearer "}, {"x-api-key": ""}, {"authorization": ""}):
            assert (await client.get("/v1/models", headers=empty)).status_code == 401
        assert said(await client.get("/v1/models", headers={"authorization": "Basic YTpi"}))[2] == FOREIGN
        # what a client sends beside it does not count
        assert (await client.get("/v1/models", headers={"authorization": "Basic x", "x-api-key": good})).is_success


async def test_a_key_that_was_rotated_works_by_both_secrets_until_the_overlap_ends(accounts, monkeypatch):
    in_an_hour = SimpleNamespace(time=lambda: time.time() + 3600, monotonic=time.monotonic)
    first = await accounts.key()
    second = await accounts.rotate(first, timedelta(hours=1))
    async with asking(nowhere(accounts)) as client:

        async def statuses():
            return [(await client.get("/v1/models", headers=bearer(one))).status_code for one in (first, second)]

        assert await statuses() == [200, 200]
        # remembered for 30 s, but not beyond its own end
        monkeypatch.setattr("llmops.gateway.auth.credential_cache.time", in_an_hour)
        assert await statuses() == [401, 200]


# -- tenants ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def stack_with_keys(card, tokenizer, accounts):
    secret = await accounts.key(scopes=ALL_SCOPES)
    async with running(card, tokenizer, store=accounts.url, lookups={"fresh": "0.3s"}) as stack:
        stack.client.headers.update(bearer(secret))
        stack.say("Hello world!")
        yield stack, accounts


async def test_a_tenant_s_responses_are_its_own(stack_with_keys):
    stack, accounts = stack_with_keys
    colleague, stranger = await accounts.key(), await accounts.key("other")
    made = (await stack.client.post(RESPONSES, json={"model": "tiny", "input": "Hello"})).json()["id"]
    stack.say("Hello", Step(hang=True))
    body = {"model": "tiny", "input": "Hello", "background": True}
    running_now = (await stack.client.post(RESPONSES, json=body)).json()["id"]
    asks = [("GET", ""), ("GET", "?stream=true"), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")]
    for name in (made, running_now):
        for method, path in asks:
            answer = await stack.client.request(method, f"{RESPONSES}/{name}{path}", headers=bearer(stranger))
            missing = await stack.client.request(method, f"{RESPONSES}/nothing{path}", headers=bearer(stranger))
            assert said(answer) == (404, "not_found", said(missing)[2].replace("nothing", name))
        assert (await stack.client.get(f"{RESPONSES}/{name}", headers=bearer(colleague))).json()["id"] == name
    body = {"model": "tiny", "input": "Hello", "previous_response_id": made}
    assert said(await stack.client.post(RESPONSES, json=body, headers=bearer(stranger)))[0] == 404
    assert (await stack.client.post(f"{RESPONSES}/{running_now}/cancel")).is_success


async def test_a_model_that_a_key_may_not_use_is_as_one_that_there_is_not(stack_with_keys):
    stack, accounts = stack_with_keys
    allowed, other = await accounts.key(models=("tiny",)), await accounts.key(models=("big",))

    async def listed(secret, **headers):
        answer = await stack.client.get("/v1/models", headers=bearer(secret) | headers)
        return [one["id"] for one in answer.json()["data"]]

    assert [await listed(allowed), await listed(other)] == [["tiny"], []]
    assert await listed(other, **{"anthropic-version": "2023-06-01"}) == []
    bodies = BODIES | {
        f"{RESPONSES}/input_tokens": {"input": "Hi"},
        f"{MESSAGES}/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/embeddings": {"input": "Hi"},
        "/v1/rerank": {"query": "Hi", "documents": ["a"]},
        "/tokenize": {"prompt": "Hi"},
        "/detokenize": {"tokens": [1]},
    }
    for path, body in bodies.items():
        told = []
        for name in ("tiny", "nope"):
            answer = await stack.client.post(path, json={**body, "model": name}, headers=bearer(other))
            assert answer.status_code == 403, path
            told.append(answer.json()["error"]["message"].replace(name, "NAME"))
        assert told == ["This API key is not for a model 'NAME'. GET /v1/models lists what it may use."] * 2
    for name in ("tiny", "nope"):
        answer = await stack.client.get(f"/v1/models/{name}", headers=bearer(other))
        assert said(answer)[:2] == (403, "model_not_allowed")
    assert (await stack.chat()).is_success
    assert (await stack.client.post(CHAT, json=stack.chat_body, headers=bearer(allowed))).is_success


async def test_health_says_which_models_only_to_a_key_that_may_use_them(stack_with_keys):
    stack, accounts = stack_with_keys
    other, metrics = await accounts.key(models=("big",)), await accounts.key(scopes=("metrics",))
    async with httpx.AsyncClient(base_url=stack.client.base_url, timeout=GENEROUS) as stranger:
        for path in ("/health/ready", "/health"):
            assert (await stranger.get(path)).json() == {"status": "ready"}
        assert (await stranger.get("/health/live")).json() == {"status": "live"}
        assert (await stranger.get("/health/ready?model=tiny")).status_code == 401
        assert (await stranger.get("/health/ready", headers=bearer(metrics))).json() == {"status": "ready"}
        assert "tiny" not in (await stranger.get("/health/ready", headers=bearer(other))).text
    assert (await stack.client.get("/health/ready")).json()["models"] == {"tiny": {"ready": True}}


async def test_a_tenant_that_is_deleted_gets_no_answer_and_those_that_began_end(stack_with_keys):
    stack, accounts = stack_with_keys
    secret = await accounts.key("leaving")
    stack.steps(Step((9,)), Step(hang=True))
    body = {**stack.chat_body, "stream": True}
    async with stack.client.stream("POST", CHAT, json=body, headers=bearer(secret), timeout=GENEROUS) as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        await accounts.delete_tenant("leaving")

        while (await stack.client.get("/v1/models", headers=bearer(secret))).status_code != 401:
            await asyncio.sleep(0.05)
        with pytest.raises(httpx.RemoteProtocolError):
            [line async for line in lines]
    await stack.idle()


# -- storms ----------------------------------------------------------------------------------------------------------


async def test_storms_of_bad_keys_cost_few_queries_and_leave_no_trace(accounts, caplog, monkeypatch):
    good = await accounts.key()
    queries = []
    original = key_queries.find_keys

    async def counted(connection, hashes):
        queries.append(len(hashes))
        return await original(connection, hashes)

    monkeypatch.setattr("llmops.gateway.auth.keys.find_keys", counted)
    bad = [new_secret() for _ in range(500)]
    malformed = [f"sk-evil-{at}-secret" for at in range(200)]
    with caplog.at_level(logging.DEBUG):
        async with asking(nowhere(accounts)) as client:
            assert (await client.get("/v1/models", headers=bearer(good))).is_success

            async def ask(secret):
                return await client.post(CHAT, json={}, headers=bearer(secret))

            queries.clear()
            # one that is remembered costs none; those that have no key's form neither
            one = [await ask(bad[0]) for _ in range(50)]
            wrong = await asyncio.gather(*(ask(secret) for secret in malformed))
            assert queries == [1]
            many = await asyncio.gather(*(ask(secret) for secret in bad for _ in range(2)))
            assert sum(queries) == len(bad)
            assert len(queries) < 50
            assert {answer.status_code for answer in (*one, *wrong, *many)} == {401}
            assert (await client.get("/v1/models", headers=bearer(good))).is_success
            metrics = await client.get("/metrics", headers=bearer(await accounts.key(scopes=("metrics",))))
    # the storm is one line: whose it was, what for, how many
    (line,) = await accounts.refusals()
    assert (line.actor, line.action, line.subject) == ("address:127.0.0.1", "access.refused", CHAT)
    assert line.detail["count"] == len(one) + len(wrong) + len(many)
    answers = "".join(answer.text + str(answer.headers) for answer in (*one, *wrong, *many))
    everything = str(line) + caplog.text + metrics.text + answers
    assert not [secret for secret in (good, *bad, *malformed) if secret in everything]


# -- start -----------------------------------------------------------------------------------------------------------


async def test_an_empty_store_asks_nobody_until_its_first_key(accounts):
    async with asking(nowhere(accounts)) as client:
        assert (await client.get("/v1/models", headers=bearer("whatever"))).is_success
        await accounts.key()

        while (await client.get("/v1/models")).status_code != 401:
            await asyncio.sleep(0.1)
        for secret in list(accounts.ids):
            await accounts.revoke(secret)
        assert (await client.get("/v1/models")).status_code == 401


def test_without_a_store_nothing_of_it_is_imported():
    program = """
import sys
from llmops.gateway.app import create_app
from llmops.gateway.auth.authentication import keys_required
from llmops.gateway.settings import GatewaySettings
settings = GatewaySettings(triton='127.0.0.1:1')
app = create_app(settings)
assert not keys_required(settings)
print([type(one).__name__ for one in app._checks])
print([m for m in sys.modules if m.split('.')[0] in ('sqlalchemy', 'asyncpg', 'aiosqlite', 'alembic')
       or m.startswith('llmops.store') or m.endswith('auth.keys')])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    checks = "['BufferedBytes', 'RequestCounter', 'OriginCheck', 'TrustedHostCheck', 'ReadLimit']"
    assert done.stdout.splitlines() == [checks, "[]"]
