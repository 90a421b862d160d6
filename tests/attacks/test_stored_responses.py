"""Small requests that name large stored responses, and owners that push out each other's."""

import gc
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from llmops.gateway.conversations.response_store import ResponseRecord
from llmops.gateway.conversations.sql_responses import SqlResponses
from llmops.gateway.errors import UnavailableError
from llmops.gateway.http.middleware import Check
from llmops.gateway.interfaces import Caller
from llmops.store.conversations import StoredMessage
from tests.attacks.harness import Engine, Gateway, Neighbour, max_growth, record, scaled
from tests.attacks.test_conversations import GROWTH, NEIGHBOUR_P95, caller
from tests.support.gateway_stack import running
from tests.support.scripted_triton import Step
from tests.support.waiting import eventually


def create(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post("/v1/responses", json={"model": "tiny", "input": "hi", "max_output_tokens": 1, **body})


@pytest.fixture
def gateway(engine: Engine, start: Callable[..., Gateway]) -> Gateway:
    return start(engine.address, log_level="error")


def tool(size: int) -> dict[str, Any]:
    """A function that is not part of the prompt (`tool_choice: none`), with a description of this many bytes."""
    return {"type": "function", "name": "f", "description": "x" * size, "parameters": {"type": "object"}}


def test_references_that_expand(gateway: Gateway) -> None:
    """A request of a few kilobytes names a stored item many times."""
    client = caller(gateway, "attacker")
    item = {"type": "message", "role": "user", "content": "hi", "id": "msg_large", "unheard_of": "y" * 4_800_000}
    assert create(client, input=[item]).status_code == 200
    references = [{"type": "item_reference", "id": "msg_large"}] * scaled(300, 1000)
    with max_growth(gateway, GROWTH), Neighbour(gateway, p95=NEIGHBOUR_P95):
        for _ in range(20):
            refused = create(client, input=references, store=False)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_chains_that_expand(gateway: Gateway) -> None:
    """Short requests, twelve at a time, continue a long chain of large responses."""
    client, previous = caller(gateway, "attacker"), None
    for _ in range(scaled(10, 40)):
        answer = create(client, previous_response_id=previous, tools=[tool(900_000)], tool_choice="none")
        if answer.status_code != 200:
            break
        previous = answer.json()["id"]
    with max_growth(gateway, GROWTH), Neighbour(gateway, p95=NEIGHBOUR_P95), ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: create(client, previous_response_id=previous), range(scaled(60, 240))))
    assert {answer.status_code for answer in answers} <= {200, 400, 503}


def test_an_owner_that_stores_much_evicts_nobody_else(engine: Engine, start: Callable[..., Gateway]) -> None:
    """Another client stores more than the gateway keeps in all."""
    kept_bytes = scaled(8_000_000, 64_000_000)
    gateway = start(engine.address, log_level="error", responses={"bytes": kept_bytes})
    victim, attacker = caller(gateway, "victim"), caller(gateway, "attacker")
    kept = [create(victim).json()["id"] for _ in range(5)]
    for _ in range(kept_bytes * 2 // 900_000):
        assert create(attacker, tools=[tool(900_000)], tool_choice="none").status_code == 200
    found = [victim.get(f"/v1/responses/{one}").status_code for one in kept]
    record(f"{found.count(200)} of {len(found)} responses of the victim are there")
    assert found == [200] * len(kept)


class TenantsInHeaders(Check):
    """Callers of tenants without a store, as those of OIDC tokens are: the header `x-user` is `TENANT/USER`."""

    async def before(self, scope, context) -> None:
        share = context.headers.get(b"x-user", b"").decode()
        tenant, _, user = share.partition("/")
        context.caller = Caller(tenant, user, share=share)


@pytest.mark.parametrize("users", [1, 20], ids=["many responses", "many users"])
async def test_a_tenant_that_stores_many_responses_evicts_no_larger_one_of_another(card, tokenizer, users) -> None:
    """Before the fix, owners with fewer responses of more bytes lost them, and so did those beside many users."""
    async with running(card, tokenizer, checks=[TenantsInHeaders()], responses={"entries": 8}) as stack:
        stack.say("Hello")

        async def create(user: str, text: str) -> str:
            body = {"model": "tiny", "input": text, "max_output_tokens": 1}
            return (await stack.client.post("/v1/responses", json=body, headers={"x-user": user})).json()["id"]

        kept = [await create("acme/ann", text) for text in ("hi " * 20, "hi", "hi")]
        for number in range(20):
            await create(f"evil/{number % users}", "hi")
        found = [await stack.client.get(f"/v1/responses/{one}", headers={"x-user": "acme/ann"}) for one in kept]
    record(f"{sum(one.status_code == 200 for one in found)} of {len(found)} responses of the victim are there")
    assert [one.status_code for one in found] == [200] * len(kept)


async def test_a_response_names_no_conversation_that_lacks_it(card, tokenizer, tmp_path) -> None:
    """Before the fix, responses named a full conversation, which had none of their turns."""
    settings = {"store": f"sqlite:///{tmp_path}/store.db", "conversations": {"conversation_bytes": 390}, "open": True}
    async with running(card, tokenizer, **settings) as stack:
        stack.say("42")
        item = {"type": "message", "role": "user", "content": "a" * 110}
        made = await stack.client.post("/v1/conversations", json={"items": [item]})
        body = {"model": "tiny", "input": "What is it?", "conversation": made.json()["id"]}
        whole = (await stack.client.post("/v1/responses", json=body)).json()
        events = (await stack.client.post("/v1/responses", json={**body, "stream": True})).text
        last = json.loads(events.rpartition("data: ")[2])["response"]
        later = (await stack.client.post("/v1/responses", json={**body, "background": True})).json()
        await eventually(lambda: _is_over(stack.client, later["id"]))
        for one in (whole, last, later):
            stored = (await stack.client.get(f"/v1/responses/{one['id']}")).json()
            assert (stored["conversation"], stored["store"]) == (None, True)
        assert (whole["conversation"], last["conversation"]) == (None, None)


async def test_a_response_in_the_background_keeps_no_messages_of_its_conversation(card, tokenizer, tmp_path) -> None:
    """Before the fix, each running response had the whole conversation in memory, which counted against nothing."""
    async with running(card, tokenizer, store=f"sqlite:///{tmp_path}/store.db", open=True) as stack:
        stack.say("42", Step(hang=True))
        item = {"type": "message", "role": "user", "content": "before a background response"}
        made = await stack.client.post("/v1/conversations", json={"items": [item]})
        body = {"model": "tiny", "input": "What is it?", "conversation": made.json()["id"], "background": True}
        assert (await stack.client.post("/v1/responses", json=body)).status_code == 200
        await eventually(lambda: stack.triton.active == 1)
        gc.collect()
        # other tests may have left messages in this process
        kept = [one for one in gc.get_objects() if type(one) is StoredMessage]
        assert not [one for one in kept if "before a background response" in repr(one)]


def away(monkeypatch, fails: Callable[[ResponseRecord], bool]) -> None:
    """Have the store be away for the responses for which `fails` is true."""
    put = SqlResponses.put

    async def put_some(self: SqlResponses, row: ResponseRecord, new: bool = True) -> bool:
        if fails(row):
            raise UnavailableError("away")
        return await put(self, row, new)

    monkeypatch.setattr(SqlResponses, "put", put_some)


async def test_a_response_that_is_not_stored_names_the_conversation_that_has_it(card, tokenizer, tmp_path, monkeypatch):
    """Before the fix, it named none, so that a client that asked again had its turn twice."""
    away(monkeypatch, lambda row: True)
    async with running(card, tokenizer, store=f"sqlite:///{tmp_path}/store.db", open=True) as stack:
        stack.say("42")
        made = (await stack.client.post("/v1/conversations", json={})).json()["id"]
        body = {"model": "tiny", "input": "What is it?", "conversation": made}
        answer = (await stack.client.post("/v1/responses", json=body)).json()
        items = (await stack.client.get(f"/v1/conversations/{made}/items")).json()["data"]
    assert (len(items), answer["store"], answer["conversation"]) == (2, False, {"id": made})


async def test_the_end_of_a_background_response_outlasts_the_store(card, tokenizer, tmp_path, monkeypatch, caplog):
    """Before the fix, a response that ended while the store was away was billed, and lost: "its gateway is gone"."""
    monkeypatch.setattr("llmops.gateway.conversations.chat_run.SAVE_INTERVAL", 0.05)
    failures: list[str] = []

    def fails(row: ResponseRecord) -> bool:
        if not row.running:
            failures.append(row.id)
        return not row.running and len(failures) <= 3

    away(monkeypatch, fails)
    async with running(card, tokenizer, store=f"sqlite:///{tmp_path}/store.db", open=True) as stack:
        stack.say("42")
        body = {"model": "tiny", "input": "What is it?", "background": True}
        made = (await stack.client.post("/v1/responses", json=body)).json()
        await eventually(lambda: _is_over(stack.client, made["id"]))
        await eventually(lambda: len(failures) >= 3)
        stack.server.should_exit = True
    async with running(card, tokenizer, store=f"sqlite:///{tmp_path}/store.db", open=True) as stack:
        found = (await stack.client.get(f"/v1/responses/{made['id']}")).json()
    assert (found["status"], found["output"][0]["content"][0]["text"]) == ("completed", "42")
    assert f"{made['id']} is not stored yet: away" in caplog.text
    assert "was not stored" not in caplog.text


async def test_the_log_names_a_response_whose_store_stays_away(card, tokenizer, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("llmops.gateway.conversations.chat_run.SAVE_INTERVAL", 0.05)
    monkeypatch.setattr("llmops.gateway.conversations.chat_run.MAX_STORE_OUTAGE", 0.2)
    away(monkeypatch, lambda row: not row.running)
    async with running(card, tokenizer, store=f"sqlite:///{tmp_path}/store.db", open=True) as stack:
        body = {"model": "tiny", "input": "What is it?", "background": True}
        made = (await stack.client.post("/v1/responses", json=body)).json()
        await eventually(lambda: f"{made['id']} was not stored, because the store stayed unavailable" in caplog.text)


async def _is_over(client: httpx.AsyncClient, response_id: str) -> bool:
    return (await client.get(f"/v1/responses/{response_id}")).json()["status"] == "completed"


def test_unknown_fields_are_not_stored(gateway: Gateway) -> None:
    """A response has only the fields that the API has, and each text of them is bounded."""
    client = caller(gateway, "attacker")
    stored = create(client, unheard_of="z" * 1000, user="me").json()
    assert "unheard_of" not in json.dumps(client.get(f"/v1/responses/{stored['id']}").json())
    assert create(client, user="u" * 5000).status_code == 400
