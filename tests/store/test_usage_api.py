"""GET /api/usage, /api/models and OpenAI's organization endpoints, counted against the records themselves."""

import asyncio
import json
import random
from collections import Counter
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from uuid import UUID

import httpx
import openai
import pytest

from llmops.control import openai_usage, usage_api
from llmops.control.store_access import SharedStore
from llmops.gateway.auth.authentication import Authentication
from llmops.gateway.interfaces import Caller
from llmops.store.accounts.limits import Budget, Limits
from llmops.store.factory import open_store
from llmops.store.prices import Price, set_price
from llmops.store.usage_writes import UsageRecord
from tests.store.control_client import BY, bearer, control, make_key
from tests.support.usage_rows import fill

ONLY_SQLITE = pytest.mark.parametrize("kind", ["sqlite"])
MIDNIGHT = datetime(2026, 9, 10, tzinfo=UTC)
COUNTS = ("input_tokens", "cached_tokens", "output_tokens", "cost_micros")


def records(whose: list[tuple[str, str]], number: int = 400, seed: int = 7) -> list[UsageRecord]:
    """Return records of these users' keys over four days.

    Some are at the very edges of a day, an hour and a minute.
    """
    dice = random.Random(seed)
    edges = [timedelta(0), timedelta(days=1), timedelta(hours=1), timedelta(minutes=1), timedelta(days=2, hours=5)]
    found = []
    for at in range(number):
        user, key = dice.choice(whose)
        moment = MIDNIGHT + timedelta(microseconds=dice.randrange(4 * 86_400 * 10**6))
        if at % 4 == 0:
            moment = MIDNIGHT + dice.choice(edges) - timedelta(microseconds=dice.choice((0, 1)))
        tokens = dice.randrange(1, 5000)
        found.append(
            UsageRecord(
                str(UUID(int=at + 1)), "g1", at, moment, f"r{at}", user, dice.choice(("tiny", "big")), tokens,
                dice.randrange(900), dice.randrange(10**6), dice.randrange(tokens), key_id=key,
            )
        )  # fmt: skip
    return found


class Tenant:
    """A tenant of two users with a key each, all they used, and one with the scope to see it."""

    async def fill(self, url: str) -> "Tenant":
        self.url = url
        self.secret, self.key, self.user = await make_key(self.url, "acme", scopes=("inference", "usage"))
        self.plain, self.plain_key, _ = await make_key(self.url, "acme", scopes=("inference",))
        _, other_key, other_user = await make_key(self.url, "zeta")
        self.records = records([(self.user, self.key), (self.user, self.plain_key)])
        theirs = records([(other_user, other_key)])
        others = [one._replace(id=str(UUID(int=10**6 + one.seq)), gateway_id="g2") for one in theirs]
        await fill(self.url, *self.records, *others)
        return self

    def sums(self, key=lambda one: (), wanted=lambda one: True) -> dict[tuple, Counter]:
        found: dict[tuple, Counter] = {}
        for one in self.records:
            if wanted(one):
                total = found.setdefault(key(one), Counter())
                total.update({name: getattr(one, name) for name in COUNTS}, requests=1)
        return found


@pytest.fixture
async def acme(url) -> Tenant:
    return await Tenant().fill(url)


SEPTEMBER = {"from": "2026-09-01", "to": "2026-09-30"}


async def test_who_asks_sees_what_its_own_key_user_and_tenant_used(acme):
    async with control(acme.url) as client:

        async def ask(secret, **params):
            answer = await client.get("/api/usage", params=SEPTEMBER | params, headers=bearer(secret))
            return answer.json() if answer.is_success else (answer.status_code, answer.json()["error"]["code"])

        of_key = acme.sums(wanted=lambda one: one.key_id == acme.plain_key)[()]
        of_all = acme.sums()[()]
        found = await ask(acme.plain)
        assert found["period"] == SEPTEMBER
        assert {name: found[name] for name in (*COUNTS, "requests")} == of_key
        assert found["cost_usd"] == of_key["cost_micros"] / 1e6
        assert (await ask(acme.plain, of="user"))["output_tokens"] == of_all["output_tokens"]
        assert await ask(acme.plain, of="tenant") == (403, "insufficient_permissions")
        found = await ask(acme.secret, of="tenant", by=["day", "model", "key"])
        assert found["requests"] == of_all["requests"] == 400
        lines = {(line["day"], line["model"], line["key"]): line["cost_micros"] for line in found["lines"]}
        wanted = acme.sums(lambda one: (str(one.created_at.date()), one.model, one.key_id))
        assert lines == {group: total["cost_micros"] for group, total in wanted.items()}
        day = await ask(acme.secret, of="tenant", **{"from": "2026-09-11", "to": "2026-09-11"})
        assert day["requests"] == sum(one.created_at.date() == date(2026, 9, 11) for one in acme.records)
        for bad in ({"by": "color"}, {"of": "galaxy"}, {"from": "yesterday"}, {"period": "2026-09"}):
            assert (await ask(acme.secret, **bad))[0] == 400


@ONLY_SQLITE
async def test_who_comes_without_a_key_sees_its_own_and_nobody_elses(url, monkeypatch):
    """Tokens of a provider: in the totals, what was used with them has no key."""
    _, _, user = await make_key(url, "acme")
    _, _, other = await make_key(url, "zeta")
    used = [
        UsageRecord(str(UUID(int=at)), "g1", at, MIDNIGHT, "r", whose, "m", 10, 1, cost, key_id=None)
        for at, (whose, cost) in enumerate(((user, 5), (other, 70), (str(UUID(int=0)), 900)))
    ]
    await fill(url, *used)
    caller = Caller("acme", user, share=f"acme/{user}", scopes=frozenset({"inference"}))
    for who, micros in ((caller, 5), (Caller(user_id="digest of what was sent"), 900)):

        async def before(self, scope, context, who=who):
            context.caller = who

        monkeypatch.setattr(Authentication, "before", before)
        async with control(url) as client:
            for of in ({}, {"of": "key"}, {"of": "user"}):
                assert (await client.get("/api/usage", params=SEPTEMBER | of)).json()["cost_micros"] == micros
            assert (await client.get("/api/usage", params={"of": "tenant"})).status_code == 403
            costs = await client.get("/v1/organization/costs?start_time=0")
            assert costs.status_code == (200 if who is caller else 403)


@ONLY_SQLITE
async def test_budgets_are_told_with_what_is_left_of_them(url):
    budget = Budget(5_000_000, "day")
    secret, key, user = await make_key(url, "acme", limits=Limits(budget=budget), scopes=("inference",))
    now = datetime.now(UTC)
    used = [UsageRecord(str(UUID(int=1)), "g1", 0, now, "r", user, "m", 9, 9, 1_250_000, key_id=key)]
    used.append(used[0]._replace(id=str(UUID(int=2)), seq=1, created_at=now - timedelta(days=1)))
    await fill(url, *used)
    async with control(url) as client:
        (told,) = (await client.get("/api/usage", headers=bearer(secret))).json()["budgets"]
    assert told.pop("until")[:10] == str(now.date() + timedelta(days=1))
    assert told == {"of": "key", "usd": 5.0, "period": "day", "spent_usd": 1.25, "left_usd": 3.75}


@ONLY_SQLITE
async def test_models_are_those_of_the_gateway_with_their_prices(url, by):
    narrow, _, _ = await make_key(url, models=("priced",), scopes=("inference",))
    async with await open_store(url) as store, store.write() as connection:
        await set_price(connection, Price("priced", BY.at, 600_000, 300_000, 900_000), BY)
        await set_price(connection, Price("later", datetime(2100, 1, 1, tzinfo=UTC), 1, 1, 1), by)
        await set_price(connection, Price("gone", BY.at, 1, 1, 1), BY)
    price = {"input": 0.6, "cached": 0.3, "output": 0.9, "currency": "usd"}
    asked = []

    def gateway(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.path, request.headers["authorization"]))
        listed = [
            {"id": "priced", "object": "model", "max_model_len": 4096, "ready": True, "capabilities": {"n": 4}},
            {"id": "free", "object": "model", "max_model_len": 256, "ready": False},
        ]
        return httpx.Response(200, stream=httpx.ByteStream(json.dumps({"object": "list", "data": listed}).encode()))

    async with control(url, "http://gateway") as client:
        app = client._transport.app
        app.state.gateway = httpx.AsyncClient(transport=httpx.MockTransport(gateway), base_url="http://gateway")
        found = (await client.get("/api/models", headers=bearer(narrow))).json()["data"]
    assert asked == [("/v1/models", f"Bearer {narrow}")]
    shown = [(one["id"], one["context_window"], one["ready"], one["capabilities"], one["price"]) for one in found]
    assert shown == [("priced", 4096, True, {"n": 4}, price), ("free", 256, False, None, None)]
    async with control(url) as client:
        found = (await client.get("/api/models", headers=bearer(narrow))).json()["data"]
        assert [(one["id"], one["price"]) for one in found] == [("priced", price)]
    async with control(url, "http://127.0.0.1:1") as client:
        assert (await client.get("/api/models", headers=bearer(narrow))).status_code == 503


# -- OpenAI's --------------------------------------------------------------------------------------------------------


@pytest.fixture
async def organization(acme):
    async with control(acme.url) as client:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(client._transport.app))
        given = {"base_url": "http://control/v1", "max_retries": 0, "http_client": http}
        yield openai.AsyncOpenAI(admin_api_key=acme.secret, api_key=acme.secret, **given).admin.organization.usage


BEGIN = int(MIDNIGHT.timestamp())
WIDTHS = {"1d": 86_400, "1h": 3600, "1m": 60}


@pytest.mark.parametrize(("width", "days"), [("1d", 4), ("1h", 4), ("1m", 1)])
async def test_the_sdk_reads_usage_bucket_by_bucket(acme, organization, width, days):
    seconds, end = WIDTHS[width], BEGIN + days * 86_400
    groups = ["model", "api_key_id", "user_id"]
    found: dict[tuple, tuple[int, ...]] = {}
    more, starts = {}, []
    while more or not starts:
        asked = {"start_time": BEGIN, "end_time": end, "bucket_width": width, "group_by": groups, **more}
        answer = await organization.completions(**asked)
        for bucket in answer.data:
            starts.append(bucket.start_time)
            assert bucket.end_time - bucket.start_time == seconds
            for result in bucket.results:
                assert result.object == "organization.usage.completions.result"
                of = (bucket.start_time, result.model, result.api_key_id, result.user_id)
                assert of not in found
                tokens = (result.input_tokens, result.input_cached_tokens, result.output_tokens)
                found[of] = (result.num_model_requests, *tokens)
        more = {"page": answer.next_page} if answer.next_page else {}
        assert answer.has_more == (answer.next_page is not None)
    assert starts == list(range(BEGIN, end, seconds))
    wanted = acme.sums(
        lambda one: (one.created_at.timestamp() // seconds * seconds, one.model, one.key_id, one.user_id),
        lambda one: BEGIN <= one.created_at.timestamp() < end,
    )
    names = ("requests", "input_tokens", "cached_tokens", "output_tokens")
    assert found == {of: tuple(total[name] for name in names) for of, total in wanted.items()}


@ONLY_SQLITE
async def test_what_the_organization_cannot_be_asked(acme):
    async with control(acme.url) as client:

        async def ask(path, secret=acme.secret, **params):
            answer = await client.get(f"/v1/organization/{path}", params=params, headers=bearer(secret))
            return answer.status_code, answer.json()["error"]["param"]

        assert await ask("usage/completions") == (400, "start_time")
        for params, param in (
            ({"start_time": "today"}, "start_time"),
            ({"start_time": -1}, "start_time"),
            ({"start_time": 10**15}, "start_time"),
            ({"start_time": 0, "limit": 32}, "limit"),
            ({"start_time": 0, "limit": 0}, "limit"),
            ({"start_time": 0, "bucket_width": "1h", "limit": 169}, "limit"),
            ({"start_time": 0, "bucket_width": "1y"}, "bucket_width"),
            ({"start_time": 0, "page": "AAAA"}, "page"),
            # PostgreSQL refuses U+0000 with an error, whose traceback filled the log
            ({"start_time": 0, "models": "\0"}, "models"),
            ({"start_time": 0, "api_key_ids": "\0"}, "api_key_ids"),
            ({"start_time": 0, "page": "page_999999999999"}, "page"),
        ):
            assert await ask("usage/completions", **params) == (400, param), params
        assert (await ask("usage/completions", start_time=0, **{"group_by[]": "color"}))[0] == 400
        assert await ask("costs", start_time=0, bucket_width="1h") == (400, "bucket_width")
        assert (await ask("costs", acme.plain, start_time=0))[0] == 403


@ONLY_SQLITE
async def test_reports_of_a_tenant_take_turns_and_keep_no_other_tenant_waiting(url, monkeypatch):
    (secret, _, _), (other, _, _) = [await make_key(url, tenant) for tenant in ("acme", "zeta")]
    now, most, allowed = Counter(), Counter(), asyncio.Event()

    def slow(module, name, tenant_of):
        query = getattr(module, name)

        async def slowly(connection, of, *more):
            tenant = tenant_of(of)
            now[tenant] += 1
            most[tenant] = max(most[tenant], now[tenant])
            if tenant == "acme":
                await allowed.wait()
            now[tenant] -= 1
            return await query(connection, of, *more)

        monkeypatch.setattr(module, name, slowly)

    slow(usage_api, "read_sums", lambda usage_filter: usage_filter.tenant_id)
    slow(openai_usage, "bucket_sums", lambda tenant: tenant)
    pages = ("costs", "usage/completions")
    paths = ("/api/usage?of=tenant", *(f"/v1/organization/{page}?start_time=0" for page in pages))
    async with control(url) as client:
        asked = [asyncio.create_task(client.get(path, headers=bearer(secret))) for path in paths * 3]
        for path in paths:
            answer = await asyncio.wait_for(client.get(path, headers=bearer(other)), 5)
            assert answer.status_code == 200
        allowed.set()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
    assert most == {"acme": 1, "zeta": 1}


@ONLY_SQLITE
async def test_requests_of_a_tenant_use_one_connection_to_the_store_at_a_time(url, monkeypatch):
    """Before the fix, 60 connections of a key to /api/models kept other tenants waiting for 3.5 s."""
    secret, _, _ = await make_key(url)
    read, used, most = SharedStore.read, Counter(), Counter()
    path = ""

    @asynccontextmanager
    async def slowly(store):
        async with read(store) as connection:
            used[path] += 1
            most[path] = max(most[path], used[path])
            await asyncio.sleep(0.01)
            yield connection
            used[path] -= 1

    async with control(url) as client:
        monkeypatch.setattr(SharedStore, "read", slowly)
        for route in client._transport.app.routes:
            path = route.path
            # who administers the store is trusted
            if path.startswith(("/api/", "/v1/")) and not path.startswith("/api/admin"):
                method = min(route.methods)
                query = {"model": "m"} if "rollouts" in path else {"start_time": 0} if "organization" in path else {}
                sent = {"params": query, "headers": bearer(secret), "json": {"name": "m"} if method == "POST" else None}
                asked = path.replace("{hook}", "rollout")
                await asyncio.gather(*(client.request(method, asked, **sent) for _ in range(3)))
    rollouts = {"/api/rollouts/verdict", "/api/rollouts/flagger/{hook}"}
    usage = {"/api/usage", "/v1/organization/usage/completions", "/v1/organization/costs"}
    assert most == dict.fromkeys({"/api/models"} | rollouts | usage, 1)
