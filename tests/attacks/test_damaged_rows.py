"""Rows of the store with values that llmops never writes: a restored dump, another program, a damaged disk."""

import asyncio
import contextlib
import json
import sqlite3
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest
from click.testing import CliRunner
from starlette.requests import Request

from llmops.background import LogOnce
from llmops.cli.main import cli
from llmops.clocks import utc_now
from llmops.control.metrics import ControlMetrics, SpendingCollector
from llmops.control.rollouts.runner import RolloutRunner
from llmops.control.store_access import SharedStore
from llmops.errors import InputError, ServerError
from llmops.gateway.app import create_app
from llmops.gateway.auth.directory import CredentialUnavailableError, Identity
from llmops.gateway.auth.keys import KeyDirectory
from llmops.gateway.conversations.conversation_store import ConversationStore
from llmops.gateway.conversations.purge import PurgeTask
from llmops.gateway.conversations.response_store import StoredResponse
from llmops.gateway.conversations.sql_responses import SqlResponses
from llmops.gateway.conversations.stored_context import StoredContext
from llmops.gateway.errors import InvalidKeyError
from llmops.gateway.interfaces import Caller, Usage
from llmops.gateway.routing.versions.version_directory import VersionDirectory
from llmops.gateway.settings import ConversationSettings, GatewaySettings
from llmops.gateway.usage.billing import Billing
from llmops.gateway.usage.ledger_sink import LedgerSink
from llmops.store import conversations
from llmops.store.accounts.key_secrets import hash_secret
from llmops.store.accounts.limits import Limits
from llmops.store.accounts.tenants import create_tenant
from llmops.store.audit import AuditContext, record_action
from llmops.store.dead_letters import DeadLetter, add_dead_letters
from llmops.store.factory import LazyStore, open_store
from llmops.store.prices import Price, set_price
from llmops.store.rollouts import (
    ModelVersion,
    add_outcomes,
    create_rollout,
    list_pins,
    open_rollouts,
    pin_key,
    save_rollout,
)
from llmops.store.tables import SUMMED
from llmops.store.usage_queries import high_water_mark, spent_micros
from tests.attacks.test_usage_topic import NOON, bill, counts, event
from tests.store.control_client import BY, bearer, control, make_key
from tests.support.gateway_stack import app_client

#: A time at which a price that the events of NOON have can be set.
FIRST = AuditContext("cli:tester", NOON - timedelta(days=2))


CONVERSATION_CHANGES = ["metadata = '{'", "updated_at = '2020-99-99'", "title = x'80'", "title = CAST(x'80' AS TEXT)"]


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/store.db"


@pytest.fixture
async def client(url):
    """A client of a gateway with this store, which asks for no key."""
    async with app_client(create_app(GatewaySettings(store=url, open=True)), "http://127.0.0.1") as made:
        yield made


def execute(folder: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(folder / "store.db")) as connection:
        connection.execute(statement)
        connection.commit()


@pytest.mark.parametrize(
    "change",
    ["rpm = -1", "rpm = 'x'", "budget_micros = 1e400, budget_period = 'day'", "scopes = '5'", "scopes = '{'",
     "budget_micros = 5, budget_period = 'age'", "models = '[1'", "expires_at = 'soon'",
     "tier = CAST(x'ff' AS TEXT)"],
)  # fmt: skip
async def test_a_damaged_key_is_an_outage_of_that_key_alone(tmp_path, url, change):
    """Before the fix, keys that were looked up beside it got 503, or waited for ever."""
    keys = [await make_key(url) for _ in range(5)]
    execute(tmp_path, f"UPDATE api_keys SET {change} WHERE id = '{keys[2][1]}'")
    directory = KeyDirectory(url)
    async with asyncio.timeout(30):
        found = await asyncio.gather(*(directory.find(secret) for secret, _, _ in keys), return_exceptions=True)
    await directory.close()
    assert isinstance(found.pop(2), CredentialUnavailableError)
    assert [caller.key_id for caller in found] == [key for at, (_, key, _) in enumerate(keys) if at != 2]


@pytest.mark.parametrize("change", CONVERSATION_CHANGES)
async def test_a_damaged_conversation_is_kept_and_keeps_no_other_from_being_purged(tmp_path, url, change, caplog):
    """Before the fix, the task ended in silence, and no tenant's conversations were purged any more."""
    (tmp_path / "archive").mkdir()
    settings = ConversationSettings(days=10)
    chats = ConversationStore(url, settings, lambda: BY.at)
    ids = [(await chats.create(Caller("acme", str(UUID(int=user + 1))), [])).id for user in range(3)]
    await chats.close()
    execute(tmp_path, f"UPDATE conversations SET {change} WHERE id = '{ids[1]}'")
    chats = ConversationStore(url, settings, lambda: BY.at + timedelta(days=20))

    async def opened() -> ConversationStore:
        return chats

    assert await PurgeTask(opened, tmp_path / "archive").purge() == 2
    assert f"{ids[1]} cannot be archived because a row is damaged" in caplog.text
    assert await PurgeTask(opened, None).purge() == 1
    await chats.close()


@pytest.mark.parametrize("is_archived", [False, True])
async def test_a_damaged_id_does_not_let_a_purge_run_for_ever(tmp_path, url, is_archived):
    """Before the fix, the purge wrote to the store without a pause until the gateway ended, or purged no other."""
    chats = ConversationStore(url, ConversationSettings(days=10), lambda: BY.at)
    for user in range(3):
        await chats.create(Caller("acme", str(UUID(int=user + 1))), [])
    await chats.close()
    # larger than what one statement of a purge deletes, so that the row is alone in its batch
    change = f"id = CAST(x'ff' AS TEXT), size = {conversations.PURGE_SIZE + 1}"
    execute(tmp_path, f"UPDATE conversations SET {change} WHERE user_id = '{UUID(int=2)}'")
    chats = ConversationStore(url, ConversationSettings(days=10), lambda: BY.at + timedelta(days=20))

    async def opened() -> ConversationStore:
        return chats

    async with asyncio.timeout(30):
        assert await PurgeTask(opened, tmp_path / "archive" if is_archived else None).purge() == 2
    await chats.close()


async def test_messages_that_are_each_others_parents_do_not_stop_the_gateway(tmp_path, client, monkeypatch):
    """Before the fix, a request to show one of them blocked the event loop for ever."""

    class Bounded(dict):
        reads = 0

        def __contains__(self, key: object) -> bool:
            self.reads += 1
            assert self.reads < 100
            return super().__contains__(key)

    children = conversations.newest_children

    async def bounded(*args) -> Bounded:
        return Bounded(await children(*args))

    monkeypatch.setattr(conversations, "newest_children", bounded)
    turns = [{"type": "message", "role": "user", "content": text} for text in "ab"]
    made = (await client.post("/v1/conversations", json={"items": turns})).json()["id"]
    last = "(SELECT id FROM messages ORDER BY position DESC LIMIT 1)"
    execute(tmp_path, f"UPDATE messages SET parent_id = {last} WHERE parent_id IS NULL")
    item = (await client.get(f"/v1/conversations/{made}/items")).json()["data"][0]["id"]
    shown = await client.post(f"/api/conversations/{made}/branch", json={"message_id": item})
    assert shown.status_code == 200, shown.text


@pytest.mark.parametrize("position", [1, 2])
async def test_a_damaged_id_of_a_message_ends_the_search_for_its_branch(tmp_path, client, position):
    """Before the fix, the gateway wrote to the store without a pause until the client left."""
    turns = [{"type": "message", "role": "user", "content": text} for text in "ab"]
    made = (await client.post("/v1/conversations", json={"items": turns})).json()["id"]
    items = (await client.get(f"/v1/conversations/{made}/items?order=asc")).json()["data"]
    execute(tmp_path, f"UPDATE messages SET id = CAST(x'ff' AS TEXT) WHERE position = {position}")
    async with asyncio.timeout(30):
        shown = await client.post(f"/api/conversations/{made}/branch", json={"message_id": items[0]["id"]})
    assert shown.status_code == 404, shown.text


@pytest.mark.parametrize("change", CONVERSATION_CHANGES)
async def test_an_export_names_what_is_damaged_and_has_the_rest(tmp_path, client, change):
    """Before the fix, an export ended at the damaged row, each time: two of five conversations came."""
    ids = [(await client.post("/v1/conversations", json={})).json()["id"] for _ in range(5)]
    execute(tmp_path, f"UPDATE conversations SET {change} WHERE id = '{UUID(ids[2][5:])}'")
    answer = await client.get("/api/conversations/export")
    assert answer.status_code == 200, answer.text
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["id"] for line in lines] == [*ids[:2], *ids[3:], ids[2]]
    assert "damaged" in lines[-1]["error"]


@pytest.mark.parametrize("change", [*CONVERSATION_CHANGES[1:], "created_at = ''"])
@pytest.mark.parametrize("query", ["", "&q=a"])
async def test_a_list_leaves_out_what_is_damaged(tmp_path, client, change, query, monkeypatch, caplog):
    """Before the fix, the owner's list was a 500 as long as one row was damaged."""
    monkeypatch.setattr("llmops.store.conversations.SEARCH_SIZE", 2)
    new = {"title": "a", "system_prompt": "b"}
    ids = [(await client.post("/api/conversations", json=new)).json()["id"] for _ in range(5)]
    execute(tmp_path, f"UPDATE conversations SET {change} WHERE id = '{UUID(ids[2][5:])}'")
    url, listed = f"/api/conversations?limit=2{query}", []
    page = (await client.get(url)).json()
    while page["has_more"]:
        listed += page["data"]
        page = (await client.get(f"{url}&after={listed[-1]['id']}")).json()
    assert [one["id"] for one in listed + page["data"]] == [ids[4], ids[3], ids[1], ids[0]]
    assert caplog.text.count(f"{ids[2]} was left out of a list") == (0 if query and "title" in change else 1)


@pytest.mark.parametrize(("key", "shown"), [("'zz'", ["conv_zz"]), ("x'ff'", [r"conv_b'\xff'"])])
async def test_a_damaged_id_ends_no_list_and_no_export(tmp_path, client, key, shown):
    """Before the fix, both were a 500."""
    ids = [(await client.post("/v1/conversations", json={})).json()["id"] for _ in range(3)]
    execute(tmp_path, f"UPDATE conversations SET id = {key} WHERE id = '{UUID(ids[1][5:])}'")
    listed = [one["id"] for one in (await client.get("/api/conversations")).json()["data"]]
    export = [json.loads(line) for line in (await client.get("/api/conversations/export")).text.splitlines()]
    assert listed == [one["id"] for one in export if "error" not in one][::-1] == [ids[2], *shown, ids[0]]


async def test_a_damaged_size_ends_no_search_and_no_write(tmp_path, client):
    """Before the fix, all searches and writes of its owner were a 503."""
    ids = [(await client.post("/api/conversations", json={"title": "a"})).json()["id"] for _ in range(2)]
    execute(tmp_path, f"UPDATE conversations SET size = {2**63 - 1} WHERE id = '{UUID(ids[0][5:])}'")
    assert (await client.post("/api/conversations", json={})).status_code == 200
    assert len((await client.get("/api/conversations?q=a")).json()["data"]) == 2


async def test_a_damaged_size_of_a_response_ends_no_write_of_another(tmp_path, url):
    """Before the fix, no response of its owner was stored."""
    stored = SqlResponses(url, GatewaySettings().responses)
    for number in range(3):
        assert await stored.put(StoredResponse("owner", {"id": f"resp_{number}", "output": []}, []).to_row())
        execute(tmp_path, f"UPDATE responses SET size = {2**63 - 1}")
    assert len(await stored.list("owner")) == 3
    # before the fix, other requests could hold that much more memory meanwhile
    execute(tmp_path, f"UPDATE responses SET size = {-(2**31)}")
    held: list[int] = []
    await StoredContext(stored, "owner", GatewaySettings().limits, held.append).items([], "resp_2")
    assert min(held) >= 0
    await stored.close()


@pytest.mark.parametrize("change", ["input_micros = 'x'", "input_micros = -1", "valid_from = 'soon'"])
async def test_a_damaged_price_leaves_the_prices_that_were_read(tmp_path, url, change, caplog):
    """Before the fix, the task that reads prices ended, and later prices were never billed."""
    async with await open_store(url) as store, store.write() as connection:
        for model in ("a", "b"):
            await set_price(connection, Price(model, BY.at, 1_000_000, 0, 0), BY)
    billing = Billing(url)
    await billing.start()
    execute(tmp_path, f"UPDATE prices SET {change} WHERE model = 'b'")
    await billing.refresh()
    assert "Prices cannot be read" in caplog.text
    assert billing.bill("a", Usage(7, 0)).micros == 7
    execute(tmp_path, "DELETE FROM prices WHERE model = 'b'")
    await billing.refresh()
    assert "Prices can be read again" in caplog.text
    await billing.close()


@pytest.mark.parametrize("change", ["started_at = 'soon'", "settings = '{'", "verdict = '['", "changed_at = 'a'"])
async def test_a_damaged_roll_out_stops_no_other(tmp_path, url, change, caplog):
    """Before the fix, control moved no roll-out of any model as long as one row was damaged."""
    async with await open_store(url, pool_size=1) as store:
        async with store.write() as connection:
            for model in ("bad", "good"):
                await create_rollout(connection, ModelVersion(model, "v2"), "starting", {}, BY)
        execute(tmp_path, f"UPDATE rollouts SET {change} WHERE model = 'bad'")
        for _ in range(3):
            async with store.read() as connection:
                assert [one.model for one in await open_rollouts(connection)] == ["good"]
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    "change", ["created_at = 'abc'", "replicas = 'abc'", "replicas = '5'", "weight = 'x'", "name = CAST(x'ff' AS TEXT)"]
)
async def test_a_damaged_version_is_that_models_alone(tmp_path, url, change, caplog):
    """Before the fix, a roll-back of another model reached no gateway, and the list of roll-outs was a 500."""
    secret, _, _ = await make_key(url)
    async with await open_store(url) as store, store.write() as connection:
        for model in ("bad", "good"):
            await create_rollout(connection, ModelVersion(model, "v2", replicas=["h:1"]), "starting", {}, BY)

    known = VersionDirectory(url, [])
    await known.refresh()
    execute(tmp_path, f"UPDATE model_versions SET {change} WHERE model = 'bad' AND name = 'v2'")
    execute(tmp_path, "UPDATE model_versions SET weight = 100 - weight WHERE model = 'good'")
    started = VersionDirectory(url, [])
    for directory, versions in ((known, ["initial", "v2"]), (started, ["initial"])):
        for _ in range(2):
            await directory.refresh()
        assert directory.preferred("good") == ["v2", "initial"]
        assert directory.preferred("bad") == versions
        await directory.close()
    assert caplog.text.count("A version of bad is damaged") == 2
    async with control(url, key=secret) as client:
        answer = await client.get("/api/admin/rollouts")
        assert answer.status_code == 200, answer.text
        found = {one["model"]: [version["name"] for version in one["versions"]] for one in answer.json()}
    assert found == {"bad": ["initial"], "good": ["initial", "v2"]}


async def test_a_damaged_pin_leaves_the_others(tmp_path, url):
    """Before the fix, no version of any model was read."""
    async with await open_store(url, pool_size=1) as store:
        async with store.write() as connection:
            await create_rollout(connection, ModelVersion("m", "v2"), "starting", {}, BY)
            for key in ("bad", "good"):
                await pin_key(connection, "m", key, "v2", BY)
        execute(tmp_path, "UPDATE version_pins SET version = CAST(x'ff' AS TEXT) WHERE key_id = 'bad'")
        async with store.read() as connection:
            assert await list_pins(connection) == {("m", "good"): "v2"}


async def test_a_model_with_a_damaged_version_starts_no_roll_out(tmp_path, url):
    """A version that cannot be read might be the one that serves."""
    async with await open_store(url, pool_size=1) as store:
        async with store.write() as connection:
            await create_rollout(connection, ModelVersion("bad", "v2"), "starting", {}, BY)
        execute(tmp_path, "UPDATE model_versions SET replicas = 'x' WHERE name = 'initial'")
        execute(tmp_path, "UPDATE rollouts SET open_model = NULL")
        async with store.write() as connection:
            with pytest.raises(InputError, match="A version of bad has a damaged value"):
                await create_rollout(connection, ModelVersion("bad", "v3"), "starting", {}, BY)
            await create_rollout(connection, ModelVersion("good", "v3"), "starting", {}, BY)


@pytest.mark.parametrize("weight", ["{}", float("nan"), -1.0, 1e308])
def test_a_weight_that_is_no_share_is_refused_before_a_request_meets_it(weight: object) -> None:
    """Before the fix, each request of the model got 500 as long as the value was there."""
    with pytest.raises(InputError):
        ModelVersion("m", "v2", weight=weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change", ["input_micros = 'x'", "input_micros = -1", "valid_from = 'soon'", "model = x'ff'", "model = x''"]
)
async def test_a_damaged_price_is_that_models_alone(tmp_path, url, change):
    """Before the fix, no event of any tenant reached the ledger, and a gateway that started refused all budgets."""
    async with await open_store(url) as store:
        async with store.write() as connection:
            for model in ("a", "b"):
                await set_price(connection, Price(model, NOON - timedelta(days=1), 1_000_000, 0, 0), FIRST)
        execute(tmp_path, f"UPDATE prices SET {change} WHERE model = 'b'")
        sink = LedgerSink(url)
        events = [event(seq, model="b" if seq == 3 else "a", price_id=None, cost_micros=0) for seq in range(9)]
        await sink.write(events)
        assert len(await sink.confirmed([one.id for one in events])) == 9
        await sink.close()
        own = 9 if "model" in change else 8
        assert await bill(store) == (own, 8 * events[0].input_tokens)
        assert await counts(store) == ({} if "model" in change else {"damaged price": 1})
    billing = Billing(url)
    await billing.start()
    assert billing.tariff("a")(7, 0, 0) == 7
    await billing.close()
    secret, _, _ = await make_key(url)
    async with control(url, key=secret) as client:
        models = await client.get("/api/models")
        assert (models.status_code, [one["id"] for one in models.json()["data"]]) == (200, ["a"])


@pytest.mark.parametrize("change", ["next_seq = 'x'", "next_seq = -5", "next_seq = 9e30"])
async def test_a_damaged_count_of_a_gateways_events_is_counted_again(tmp_path, url, change):
    """Before the fix, the events beside those of that gateway waited, or its own were parked."""
    sink = LedgerSink(url)
    await sink.write([event(seq, gateway_id=gateway) for gateway in ("bad", "good") for seq in range(3)])
    execute(tmp_path, f"UPDATE gateways SET {change} WHERE id = 'bad'")
    await sink.write([event(3, gateway_id=gateway) for gateway in ("bad", "good")])
    await sink.close()
    async with await open_store(url) as store:
        assert await bill(store) == (8, 24)
        async with store.read() as connection:
            assert [await high_water_mark(connection, gateway) for gateway in ("bad", "good")] == [4, 4]


@pytest.mark.parametrize("change", ["rpm = -1", "budget_micros = 5, budget_period = 'age'", "created_at = 'soon'"])
async def test_a_damaged_tenant_is_an_outage_of_that_tenant_alone(tmp_path, url, change, caplog):
    """Before the fix, tokens of one of its users had all new tokens get 503; no alert told of parked events."""
    async with await open_store(url) as store:
        async with store.write() as connection:
            for tenant in ("bad", "good"):
                await create_tenant(connection, tenant, Limits(), BY)
        await store.transact(partial(add_dead_letters, parked=[DeadLetter("not signed", "t", b"v")], at=NOON))
    execute(tmp_path, f"UPDATE tenants SET {change} WHERE id = 'bad'")
    directory, shared = KeyDirectory(url), SharedStore(url)
    with pytest.raises(CredentialUnavailableError):
        await directory.member("bad", "a@bad", Identity("i", "a"), frozenset(), 0.0)
    assert (await directory.member("good", "a@good", Identity("i", "b"), frozenset(), 0.0)).tenant_id == "good"
    execute(tmp_path, "UPDATE tenants SET deleted_at = created_at WHERE id = 'bad'")
    # before the fix, a cached member stayed in use for as long as without a store
    with pytest.raises(InvalidKeyError):
        await directory.member("bad", "a@bad", Identity("i", "a"), frozenset(), 0.0)
    page = await ControlMetrics(SpendingCollector(shared)).show(Request({"type": "http"}))
    assert b'dead_letters{reason="not signed"} 1.0' in bytes(page.body)
    await asyncio.gather(directory.close(), shared.close())
    assert caplog.text.count("The tenant bad has a damaged value") <= 1


DAMAGED_KEYS = [
    *(f"api_keys SET {change}" for change in ("scopes = '{'", "rpm = -1", "expires_at = 'soon'", "name = x'ff'")),
    *("api_keys SET prefix = CAST(x'ff' AS TEXT)", "users SET email = CAST(x'ff' AS TEXT)"),
    *("tenants SET rpm = 'x'", "tenants SET created_at = 'soon'"),
]


@pytest.mark.parametrize("change", DAMAGED_KEYS)
@pytest.mark.parametrize("now", [False, True])
async def test_a_damaged_key_can_be_revoked(tmp_path, url, change, now):
    """Before the fix, revoking it was a 500, and gateways went on to accept it for an hour."""
    admin, _, _ = await make_key(url, "good")
    secret, key, _ = await make_key(url, "bad")
    tables = {"api_keys": f"id = '{key}'", "users": "tenant_id = 'bad'", "tenants": "id = 'bad'"}
    execute(tmp_path, f"UPDATE {change} WHERE {tables[change.partition(' ')[0]]}")
    async with control(url, key=admin) as client:
        answer = await client.post(f"/api/admin/keys/{key}/revoke", json={"now": now})
        assert answer.status_code == 200, answer.text
        assert answer.json()["id"] == key
        assert (await client.post(f"/api/admin/keys/{key}/revoke", json={})).status_code == 400
        assert (await client.get("/api/admin/audit")).json()[0]["action"] == "key.revoke"
    await rejects(url, secret)


@pytest.mark.parametrize(
    "change", ["rpm = 'x'", "tpm = 1.5", "created_at = 'soon'", "budget_micros = -1, budget_period = 'day'",
               "budget_micros = 1.5, budget_period = 'day'"]
)  # fmt: skip
async def test_a_damaged_tenant_can_be_deleted(tmp_path, url, change):
    """Before the fix, deleting it was a 500."""
    admin, _, _ = await make_key(url, "good")
    secret, _, _ = await make_key(url, "bad")
    execute(tmp_path, f"UPDATE tenants SET {change} WHERE id = 'bad'")
    async with control(url, key=admin) as client:
        answer = await client.delete("/api/admin/tenants/bad")
        assert (answer.status_code, answer.json()) == (200, {"id": "bad", "damaged": True})
        shown = await client.get("/api/admin/tenants/bad")
        assert (shown.status_code, "damaged value" in shown.text) == (400, True)
    await rejects(url, secret)


def test_the_command_line_withdraws_what_is_damaged(tmp_path, url):
    _, key, _ = asyncio.run(make_key(url, "bad"))
    execute(tmp_path, "UPDATE tenants SET rpm = 'x'")
    for command, text in (
        (["key", "revoke", key], f"{key}, which is damaged, is revoked"),
        (
            ["tenant", "delete", "bad"],
            "bad is deleted",
        ),
    ):
        done = CliRunner().invoke(cli, [*command, "--store", url])
        assert (done.exit_code, text in done.output) == (0, True), done.output


async def rejects(url: str, secret: str) -> None:
    """Check that a gateway rejects the key, and does not take it from its cache as it does without a store."""
    directory = KeyDirectory(url)
    with contextlib.suppress(InvalidKeyError):
        assert await directory.find(secret) is None
    await directory.close()


DAMAGED_LISTS = [
    ("keys", "api_keys", "user_id IN (SELECT id FROM users WHERE tenant_id = 'bad')",
     ["scopes = '{'", "models = '[1]'", "expires_at = 'soon'", "rpm = -1", "name = x'ff'", "created_at = 'a'",
      "name = CAST(x'ff' AS TEXT)", "scopes = CAST(x'ff' AS TEXT)"]),
    ("keys", "users", "tenant_id = 'bad'", ["email = CAST(x'ff' AS TEXT)"]),
    ("keys", "tenants", "id = 'bad'", ["rpm = 'x'", "deleted_at = 'soon'", "budget_micros = 5, budget_period = 'age'"]),
    ("tenants", "tenants", "id = 'bad'", ["rpm = -1", "budget_micros = 'x'", "created_at = 'soon'",
     "created_at = CAST(x'ff' AS TEXT)"]),
    ("prices", "prices", "model = 'bad'", ["input_micros = 'x'", "valid_from = 'soon'", "output_micros = -1",
     "model = x'ff'", "model = CAST(x'ff' AS TEXT)"]),
    ("audit", "audit", "action = 'price.set' AND subject LIKE 'bad%'",
     ["detail = '{'", "detail = '[1]'", "actor = x'ff'", "created_at = ''", "actor = CAST(x'ff' AS TEXT)"]),
    ("audit?limit=4", "audit", "action = 'price.set' AND subject LIKE 'bad%'", ["created_at = 'soon'"]),
    ("usage/dead-letters", "dead_letters", "reason = 'bad'", ["count = 'x'", "last_at = 'soon'",
     "source = CAST(x'ff' AS TEXT)"]),
]  # fmt: skip


async def fill(url: str) -> str:
    """Add a good and a bad row of each kind; return an administrator's secret."""
    secret, _, _ = await make_key(url, "good")
    await make_key(url, "bad")
    async with await open_store(url) as store:
        async with store.write() as connection:
            for model in ("bad", "good"):
                await set_price(connection, Price(model, BY.at, 1_000_000, 0, 0), BY)
        await store.transact(
            partial(add_dead_letters, parked=[DeadLetter(one, "t", b"v") for one in ("bad", "good")], at=NOON)
        )
    return secret


@pytest.mark.parametrize(
    ("listed", "table", "row", "change"),
    [(listed, table, row, change) for listed, table, row, changes in DAMAGED_LISTS for change in changes],
)
async def test_a_damaged_row_ends_no_list_of_an_administrator(
    tmp_path, url, listed, table, row, change, caplog, monkeypatch
):
    """Before the fix, the list was a 500 as long as one row was damaged."""
    monkeypatch.setattr("llmops.store.damaged_rows._damaged", LogOnce())
    monkeypatch.setattr("llmops.control.api_route.PAGE_SIZE", 1)
    secret = await fill(url)
    async with control(url, key=secret) as client:
        whole = (await client.get(f"/api/admin/{listed.partition('?')[0]}")).json()
        execute(tmp_path, f"UPDATE {table} SET {change} WHERE {row}")
        for _ in range(2):
            answer = await client.get(f"/api/admin/{listed}")
            assert answer.status_code == 200, answer.text
            left = [one for one in whole if one in answer.json()]
            assert len(left) == len(answer.json()) == (4 if "limit" in listed else len(whole) - 1)
    assert caplog.text.count("is left out; correct the row in the store") == 1


@pytest.mark.parametrize(
    ("listed", "change"),
    [("keys", "api_keys SET scopes = '5' WHERE hash <> '{}'"), ("keys", "api_keys SET rpm = -1 WHERE hash <> '{}'"),
     ("tenants", "tenants SET budget_micros = -5, budget_period = 'day' WHERE id = 'bad'"),
     ("prices", "prices SET input_micros = -1 WHERE model = 'bad'"),
     ("audit", "audit SET detail = '[1]' WHERE action = 'price.set' AND subject LIKE 'bad%'"),
     # before the fix, the driver raised an error for the whole result
     ("keys", "api_keys SET created_at = '0044-03-15 BC' WHERE hash <> '{}'"),
     ("keys", "api_keys SET expires_at = '294276-01-01' WHERE hash <> '{}'"),
     ("keys", "api_keys SET scopes = (repeat('[', 3000) || repeat(']', 3000))::json WHERE hash <> '{}'"),
     ("tenants", "tenants SET created_at = '0044-03-15 BC' WHERE id = 'bad'"),
     ("prices", "prices SET valid_from = '294276-01-01' WHERE model = 'bad'"),
     ("audit", "audit SET created_at = '0044-03-15 BC' WHERE action = 'price.set' AND subject LIKE 'bad%'"),
     ("audit", "audit SET detail = ('[' || repeat('9', 5000) || ']')::json WHERE subject LIKE 'bad@%'"),
     ("usage/dead-letters", "dead_letters SET last_at = '294276-01-01' WHERE reason = 'bad'")],
)  # fmt: skip
async def test_a_damaged_row_of_postgresql_ends_no_list(databases, listed, change, caplog, monkeypatch):
    monkeypatch.setattr("llmops.store.damaged_rows._damaged", LogOnce())
    url = databases.url(await asyncio.to_thread(databases.create))
    secret = await fill(url)
    async with control(url, key=secret) as client:
        whole = (await client.get(f"/api/admin/{listed}")).json()
        database = url.rpartition("/")[2]
        await databases.run(f"UPDATE {change.format(hash_secret(secret))}", database)
        answer = await client.get(f"/api/admin/{listed}")
    assert answer.status_code == 200, answer.text
    assert len(answer.json()) == len(whole) - 1
    assert caplog.text.count("is left out; correct the row in the store") == 1


async def test_a_text_that_postgresql_refuses_is_no_outage(databases):
    """Before the fix, it was a 503 that asked to try again. A database without an encoding counts bytes."""
    url = databases.url(await asyncio.to_thread(databases.create))
    async with app_client(create_app(GatewaySettings(store=url, open=True)), "http://127.0.0.1") as client:
        made = await client.post("/api/conversations", json={"title": "é" * 300})
        item = {"type": "message", "role": "user", "content": "a", "id": "é" * 128}
        added = await client.post("/v1/conversations", json={"items": [item]})
    assert {made.status_code, added.status_code} <= {200, 400}, made.text + added.text


async def test_a_text_that_utf_8_cannot_encode_ends_no_list(tmp_path, url) -> None:
    """Before the fix, the lists of all keys and roll-outs were a 500."""
    secret, _, _ = await make_key(url)
    async with await open_store(url) as store, store.write() as connection:
        await create_rollout(connection, ModelVersion("m", "v2", replicas=["h:1"]), "starting", {}, BY)
    odd = "'[\"\\ud800\"]'"
    for change in (f"model_versions SET replicas = {odd}", f"api_keys SET models = {odd}"):
        execute(tmp_path, f"UPDATE {change}")
    async with control(url) as client:
        for listed in ("keys", "rollouts"):
            answer = await client.get(f"/api/admin/{listed}", headers=bearer(secret))
            assert (answer.status_code, len(answer.json())) == (200, 1), answer.text


async def test_a_text_that_utf_8_cannot_encode_ends_no_audit_log(url) -> None:
    """Before the fix, one category of a moderation service made every read of the audit log fail."""
    secret, _, _ = await make_key(url)
    async with await open_store(url) as store, store.write() as connection:
        await record_action(connection, BY, "safety.find", "remote", detail={"category": "a\ud800b", "count": 2})
    async with control(url) as client:
        read = await client.get("/api/admin/audit?action=safety", headers=bearer(secret))
    assert read.json()[0]["detail"] == {"category": "a?b", "count": 2}


@pytest.mark.parametrize("value", ["1e400", "9223372036854775807", "-1e400", "'x'"])
@pytest.mark.parametrize(("table", "this"), [("tenant_totals", "tenant_id = 'bad'"), ("usage_totals", "model = 'bad'")])
async def test_a_damaged_sum_is_left_out_of_reports_and_metrics(tmp_path, url, value, table, this):
    """Before the fix, reports of all tenants were a 500, and metrics kept their last values."""
    keys = {tenant: await make_key(url, tenant) for tenant in ("bad", "good")}
    sink = LedgerSink(url)
    for tenant, (_, key, user) in keys.items():
        made = partial(event, tenant_id=tenant, user_id=user, key_id=key, model=tenant, at=utc_now(), gateway_id=tenant)
        await sink.write([made(seq) for seq in range(3)])
    await sink.close()
    for name in SUMMED:
        execute(tmp_path, f"UPDATE {table} SET {name} = {value} WHERE {this}")
    async with control(url, key=keys["good"][0]) as client:
        coarse = table == "tenant_totals"
        for by in ("tenant", "day") if coarse else ("user", "key"):
            answer = await client.get(f"/api/admin/usage?by={by}")
            assert answer.status_code == 200, answer.text
            lines = {line[by]: line["requests"] for line in answer.json()["lines"]}
            assert sorted(lines.values()) == ([3] if by == "day" else [0, 3])
            assert answer.json()["requests"] == (3 if coarse else 6)
        shown = (await client.get("/metrics")).text
        assert 'llmops_spent_tokens{kind="output",tenant="good"}' in shown


@pytest.mark.parametrize("value", ["'x'", "9223372036854775807", "-1e400"])
async def test_usage_after_a_damaged_sum_uses_up_no_budget(tmp_path, url, value):
    """Before the fix, the next event made it $9,007,199,254, and the tenant got no answer until the next month."""
    _, key, user = await make_key(url, "acme")
    sink, now = LedgerSink(url), utc_now()
    made = partial(event, user_id=user, key_id=key, at=now, price_id="p", cost_micros=10)
    await sink.write([made(0)])
    for table in ("tenant_totals", "usage_totals"):
        execute(tmp_path, f"UPDATE {table} SET cost_micros = {value}")
    await sink.write([made(1)])
    await sink.close()
    async with await open_store(url) as store, store.read() as connection:
        assert await spent_micros(connection, now, tenant_id="acme") == 10
        assert await spent_micros(connection, now, key_id=key) == 10


@pytest.mark.parametrize(
    "change", ["tenant_totals SET tenant_id = x'ff'", "tenant_totals SET model = x'ff'",
               "dead_letters SET reason = x'ff'", "dead_letters SET count = 9223372036854775807",
               "dead_letters SET count = 1e400"]
)  # fmt: skip
async def test_a_damaged_label_or_count_leaves_controls_metrics(tmp_path, url, change):
    """Before the fix, control's metrics, with the count of parked events, were a 500."""
    secret, key, user = await make_key(url, "good")
    sink = LedgerSink(url)
    await sink.write([event(0, tenant_id="good", user_id=user, key_id=key, at=utc_now())])
    await sink.close()
    async with await open_store(url) as store:
        parked = [DeadLetter("bad", "t", b"v"), DeadLetter("bad", "t", b"w")]
        await store.transact(partial(add_dead_letters, parked=parked, at=NOON))
    execute(tmp_path, f"UPDATE {change}")
    async with control(url, key=secret) as client:
        answer = await client.get("/metrics")
        assert answer.status_code == 200, answer.text
        assert "llmops_usage_dead_letters{" in answer.text


@pytest.mark.parametrize(
    "change", ["settings = '[5]'", "settings = '{\"percent\": \"x\"}'", "state = 'x'", "percent = 'x'", "percent = -1",
               "verdict = '5'", "changed_at = 'soon'", "revision = 'x'"]
)  # fmt: skip
async def test_a_change_of_a_damaged_roll_out_is_refused_with_a_reason(tmp_path, url, change):
    """Before the fix, the change and the list of all roll-outs were a 500."""
    secret, _, _ = await make_key(url)
    async with await open_store(url) as store, store.write() as connection:
        for model in ("bad", "good"):
            await create_rollout(connection, ModelVersion(model, "v2"), "shifting", {}, BY)
    execute(tmp_path, f"UPDATE rollouts SET {change} WHERE model = 'bad'")
    async with control(url, key=secret) as client:
        for action in ("pause", "rollback"):
            answer = await client.post("/api/admin/rollouts/actions", json={"model": "bad", "action": action})
            assert (answer.status_code, "has a damaged value" in answer.text) == (400, True), answer.text
        assert "good" in [one["model"] for one in (await client.get("/api/admin/rollouts")).json()]
        verdict = await client.get("/api/rollouts/verdict?model=bad")
        own = 'percent": "x' in change  # the verdict does not depend on the settings
        assert (verdict.status_code, "damaged value" in verdict.text) == ((200, False) if own else (400, True))
        changed = await client.post("/api/admin/rollouts/actions", json={"model": "good", "action": "pause"})
        assert changed.status_code == 200, changed.text


@pytest.mark.parametrize("change", ["verdict = '{'", 'verdict = \'{"decision": "x", "reason": ""}\''])
async def test_a_damaged_roll_out_is_not_promoted_for_an_earlier_one(tmp_path, url, change):
    """Before the fix, Argo Rollouts and Flagger were told to promote, because the roll-out before was promoted."""
    secret, _, _ = await make_key(url)
    async with await open_store(url) as store, store.write() as connection:
        earlier = await create_rollout(connection, ModelVersion("m", "v2"), "starting", {}, BY)
        await save_rollout(connection, replace(earlier, state="promoted", open_model=None, revision=1), BY)
        later = AuditContext(BY.actor, BY.at + timedelta(days=1))
        await create_rollout(connection, ModelVersion("m", "v3"), "shifting", {}, later)
    execute(tmp_path, f"UPDATE rollouts SET {change} WHERE candidate = 'v3'")
    async with control(url, key=secret) as client:
        asked = await client.get("/api/rollouts/verdict?model=m")
        hook = await client.post("/api/rollouts/flagger/confirm-promotion?model=m", json={"name": "m"})
        assert (asked.status_code, hook.status_code) == (400, 400), asked.text
        assert "has a damaged value" in asked.text


@pytest.mark.parametrize(
    "change", ["usage_records SET seq = 1e400 WHERE gateway_id = 'bad'", "usage_records SET seq = 7.5 WHERE seq = 2",
               "usage_records SET seq = 'x' WHERE seq = 2", "gateways SET next_seq = 1e400",
               "usage_records SET gateway_id = x'ff', seq = 9 WHERE seq = 2"]
)  # fmt: skip
async def test_a_damaged_number_of_an_event_ends_no_report(tmp_path, url, change):
    """Before the fix, `usage reconcile` and the hourly report failed, for all gateways."""
    secret, _, _ = await make_key(url)
    sink = LedgerSink(url)
    await sink.write([event(seq, gateway_id="bad") for seq in range(3)])
    await sink.write([event(seq, gateway_id="good") for seq in (0, 1, 3)])
    await sink.close()
    execute(tmp_path, f"UPDATE {change}")
    if "seq = 2" in change:
        execute(tmp_path, "UPDATE gateways SET next_seq = 0 WHERE id = 'bad'")
    async with control(url, key=secret) as client:
        made = await client.post("/api/admin/usage/reconcile", json={})
        assert made.status_code == 200, made.text


@pytest.mark.parametrize("value", ["'x'", "1e400", "x'ff'", "4.5"])
async def test_a_damaged_number_of_an_event_holds_up_no_later_event(tmp_path, url, value):
    """Before the fix, no later event of that gateway reached the ledger."""
    sink = LedgerSink(url)
    await sink.write([event(seq) for seq in range(3)])
    execute(tmp_path, f"UPDATE usage_records SET seq = {value} WHERE seq = 1")
    await sink.write([event(seq) for seq in range(3, 6)])
    assert await sink.next_number(event(0).gateway_id) == 6
    await sink.close()


@pytest.mark.parametrize("detail", ["{}", '{"engines": [5]}', '{"engines": [{"model": "m", "served": "x"}]}', "{"])
async def test_a_damaged_report_of_the_ledger_ends_no_later_report(tmp_path, url, detail):
    """Before the fix, no report could be made as long as the latest one was damaged."""
    secret, _, _ = await make_key(url)
    async with control(url, key=secret) as client:
        for _ in range(2):
            made = await client.post("/api/admin/usage/reconcile", json={"served": {"m": 5}})
            assert made.status_code == 200, made.text
            execute(tmp_path, f"UPDATE audit SET detail = '{detail}' WHERE action = 'usage.reconcile'")


@pytest.mark.parametrize(
    "change", ["outcomes = '{'", "outcomes = '5'", "outcomes = '[5]'", "outcomes = '[{}]'", "written_at = '2099'",
               "outcomes = '[{\"version\": \"v2\", \"ok\": true, \"ttft_s\": \"x\"}]'"]
)  # fmt: skip
async def test_a_damaged_batch_of_outcomes_is_not_judged_and_the_others_are(tmp_path, url, change):
    """Before the fix, the roll-out was judged no further."""
    async with await open_store(url, pool_size=1) as store:
        async with store.write() as connection:
            await create_rollout(connection, ModelVersion("m", "v2"), "shifting", {}, BY)
            for at in range(3):
                outcome = {"version": "v2", "ok": True}
                await add_outcomes(connection, "m", [outcome], BY.at + timedelta(seconds=at))
        execute(tmp_path, f"UPDATE rollout_outcomes SET {change} WHERE written_at LIKE '%:01.%'")
        runner = RolloutRunner(url, None)  # type: ignore[arg-type]
        runner._store = LazyStore(url)
        await runner.look()
        await runner._store.close()
        async with store.read() as connection:
            (rollout,) = await open_rollouts(connection)
        assert rollout.verdict is not None
        assert rollout.verdict["rows"][0]["canary"] == (3 if "ttft" in change else 2)


@pytest.mark.parametrize(
    "detail", ['{"budget": "x"}', '{"budget": {}}', '{"spent_micros": "x"}', '{"spent_micros": [1]}']
)
def test_the_command_line_lists_entries_with_a_damaged_amount(tmp_path, url, detail):
    """Before the fix, `llmops audit` ended with a traceback."""
    asyncio.run(make_key(url))
    execute(tmp_path, f"UPDATE audit SET detail = '{detail}' WHERE action = 'tenant.create'")
    done = CliRunner().invoke(cli, ["audit", "--store", url])
    assert (done.exit_code, "key.create" in done.output) == (0, True), done.output


def test_the_command_line_shows_roll_outs_beside_one_with_a_damaged_verdict(tmp_path, url):
    """Before the fix, `llmops rollout status` showed no roll-out after it."""

    async def fill() -> None:
        async with await open_store(url) as store, store.write() as connection:
            for model in ("bad", "good"):
                await create_rollout(connection, ModelVersion(model, "v2"), "shifting", {}, BY)

    asyncio.run(fill())
    execute(tmp_path, "UPDATE rollouts SET verdict = '{}', id = '0' WHERE model = 'bad'")
    execute(tmp_path, "UPDATE rollouts SET started_at = '2025-01-01 00:00:00.000000' WHERE model = 'bad'")
    done = CliRunner().invoke(cli, ["rollout", "status", "--store", url])
    assert isinstance(done.exception, ServerError)
    assert "good" in done.output


async def test_a_damaged_user_is_named(tmp_path, url):
    """Before the fix, lists, reports and new keys of that user were a 500."""
    secret, _, _ = await make_key(url)
    await make_key(url, "bad")
    execute(tmp_path, "UPDATE users SET created_at = 'soon' WHERE tenant_id = 'bad'")
    async with control(url, key=secret) as client:
        answers = [await client.get(f"/api/admin/{path}?user=admin@bad") for path in ("keys", "usage")]
        answers.append(await client.post("/api/admin/keys", json={"tenant": "bad", "user": "admin@bad"}))
        for answer in answers:
            assert (answer.status_code, "damaged value" in answer.text) == (400, True), answer.text


@pytest.mark.parametrize(("table", "width"), [("tenant_totals", "1d"), ("usage_totals", "1d"), ("usage_records", "1h")])
async def test_a_damaged_day_is_left_out_of_reports_by_time(tmp_path, url, table, width):
    """Before the fix, reports by day were a 500 for all tenants, and the tenant's own by the hour."""
    secret, key, user = await make_key(url, "good")
    sink, now = LedgerSink(url), utc_now()
    made = partial(event, tenant_id="good", user_id=user, key_id=key, at=now)
    await sink.write([made(0), made(1, model="other")])
    await sink.close()
    begin, column = now - timedelta(days=2), "created_at" if table == "usage_records" else "day"
    wrong = f"{now - timedelta(days=1):%Y-%m-%d}x"[: 11 if column == "day" else 10] + (" 99" if column != "day" else "")
    execute(tmp_path, f"UPDATE {table} SET {column} = '{wrong}' WHERE model = 'other'")
    group = "user_id" if table == "usage_totals" else "model"
    async with control(url, key=secret) as client:
        for path in (
            f"/api/admin/usage?from={begin:%Y-%m-%d}&by=day{'&by=user' if table == 'usage_totals' else ''}",
            f"/v1/organization/usage/completions?start_time={begin.timestamp():.0f}&bucket_width={width}"
            f"&limit={31 if width == '1d' else 72}&group_by={group}",
        ):
            answer = await client.get(path)
            assert answer.status_code == 200, answer.text
        assert f'"output_tokens":{made(0).output_tokens}' in answer.text


async def test_a_day_that_no_month_has_ends_no_report_by_the_hour(tmp_path, url):
    """Before the fix, the tenant's own report was a 500: SQLite reads February 30 as March 2."""
    secret, key, user = await make_key(url, "acme")
    sink = LedgerSink(url)
    await sink.write([event(0, user_id=user, key_id=key)])
    await sink.close()
    execute(tmp_path, "UPDATE usage_records SET created_at = '2026-02-30 10:00:00.000000'")
    begin = datetime(2026, 2, 28, tzinfo=UTC).timestamp()
    query = f"start_time={begin:.0f}&end_time={begin + 86_400:.0f}&bucket_width=1h"
    async with control(url, key=secret) as client:
        answer = await client.get(f"/v1/organization/usage/completions?{query}")
    assert answer.status_code == 200, answer.text
