"""Tenants, users and keys, on both databases."""

import difflib
import shutil
import sqlite3
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select

from llmops.control.retention import prune_expired
from llmops.errors import InputError, UnknownResourceError, VersionMismatchError
from llmops.gateway.auth.authentication import keys_required
from llmops.gateway.auth.credential_cache import CachedDirectory
from llmops.gateway.auth.keys import KeyDirectory
from llmops.gateway.errors import UnavailableError
from llmops.gateway.settings import GatewaySettings
from llmops.store.accounts.key_secrets import hash_secret, is_secret, new_secret
from llmops.store.accounts.keys import KeySpec, create_key, require_key, revoke_key, rotate_key, update_key
from llmops.store.accounts.limits import Limits
from llmops.store.accounts.tenants import MAX_COMPARED, create_tenant, did_you_mean, find_tenant
from llmops.store.accounts.users import ensure_user, find_user, require_user
from llmops.store.audit import AuditContext, list_audit_entries, record_action
from llmops.store.dead_letters import DeadLetter, add_dead_letters, count_dead_letters
from llmops.store.factory import open_store
from llmops.store.tables import SCHEMA_TABLE, api_keys, users
from tests.support.accounts import BY, add_key


async def account(connection, by, email="user@acme.example", tenant="acme"):
    if await find_tenant(connection, tenant) is None:
        await create_tenant(connection, tenant, Limits(rpm=1000), by)
    return await ensure_user(connection, tenant, email, by, "pro")


async def test_the_store_does_not_hold_the_key(store, by, url, kind):
    async with store.write() as connection:
        _, secret = await create_key(connection, await account(connection, by), KeySpec(), by)
    assert is_secret(secret)
    async with store.read() as connection:
        for table in (api_keys, users):
            assert secret not in str((await connection.execute(select(table))).all())
        assert secret not in str(await list_audit_entries(connection))
        for column in (api_keys.c.hash, users.c.api_key_hash):
            assert await connection.scalar(select(column)) == hash_secret(secret)


async def test_a_revoked_key_is_neither_changed_nor_rotated(store, by):
    async with store.write() as connection:
        key, _ = await create_key(connection, await account(connection, by), KeySpec(), by)
        await revoke_key(connection, key.id, by)
        revoked = await require_key(connection, key.id)
        for attempt in (
            update_key(connection, revoked, KeySpec(tier="pro"), by),
            rotate_key(connection, revoked, timedelta(0), by),
            revoke_key(connection, key.id, by),
        ):
            with pytest.raises(InputError, match=f"{key.id} was revoked"):
                await attempt


async def test_an_address_is_one_user_of_one_tenant(store, by):
    async with store.write() as connection:
        user = await account(connection, by)
        assert await ensure_user(connection, "acme", "User@ACME.example", by, "free") == user
        assert await find_user(connection, "USER@acme.example") == user
        await create_tenant(connection, "other", Limits(), by)
        with pytest.raises(InputError, match=r"user@acme.example belongs to another tenant"):
            await ensure_user(connection, "other", "user@acme.example", by)


async def test_names_and_addresses_that_are_none(store, by):
    async with store.write() as connection:
        for name in ("", "Acme", "a" * 64, "-acme", "ac me", "acme\n", "../acme"):
            with pytest.raises(InputError, match="cannot name a tenant"):
                await create_tenant(connection, name, Limits(), by)
        await create_tenant(connection, "acme", Limits(), by)
        for email in ("acme", "@acme.example", "a b@acme.example", "a@" + "b" * 254, "a@b@c"):
            with pytest.raises(InputError, match="is not an e-mail address"):
                await ensure_user(connection, "acme", email, by)


# -- The audit log: in the transaction of what it tells about, the newest first; on both databases


async def test_entries_come_newest_first_of_a_tenant_or_since_a_time(store, by):
    async with store.write() as connection:
        for number in range(4):
            who = replace(by, at=by.at + timedelta(seconds=number))
            tenant = ("acme", "zeta")[number % 2]
            await record_action(connection, who, "key.refused", f"key-{number}", tenant, {"n": number})
    async with store.read() as connection:
        since = {"since": by.at + timedelta(seconds=2)}
        for of, numbers in (({}, [3, 2, 1, 0]), ({"tenant_id": "acme"}, [2, 0]), (since, [3, 2])):
            assert [one.detail["n"] for one in await list_audit_entries(connection, **of)] == numbers
        [last] = await list_audit_entries(connection, limit=1)
    assert (last.created_at, last.actor, last.action, last.subject, last.tenant_id) == (
        by.at + timedelta(seconds=3), "cli:tester", "key.refused", "key-3", "zeta",
    )  # fmt: skip


async def test_old_entries_and_parked_events_are_deleted_and_newer_ones_stay(store, by, monkeypatch):
    monkeypatch.setattr("llmops.store.audit.PRUNE_BATCH_SIZE", 10)
    for age in (500, 401, 399, 0):
        at = by.at - timedelta(days=age)
        async with store.write() as connection:
            for number in range(12):
                await record_action(connection, AuditContext("cli:ann", at), "key.create", f"key-{age}-{number}")
        parked = [DeadLetter("not signed by a gateway", "t[0] at 1", b"%d" % age)]
        await store.transact(lambda connection, parked=parked, at=at: add_dead_letters(connection, parked, at))
    assert await prune_expired(store, by.at, timedelta(days=400)) == (24, 2)
    async with store.read() as connection:
        assert {entry.subject.split("-")[1] for entry in await list_audit_entries(connection)} == {"399", "0"}
        assert await count_dead_letters(connection) == {"not signed by a gateway": 2}


# -- A gateway's keys in a real PostgreSQL, which goes away and comes back; stores that a gateway cannot start with


async def test_a_postgresql_that_is_killed_leaves_the_keys_in_use(own_postgres, by):
    url, stop, start = own_postgres
    async with await open_store(url) as opened:
        secret, _, _ = await add_key(opened, "acme", models=("tiny",))
    now = [0.0]
    cached = CachedDirectory(KeyDirectory(url), clock=lambda: now[0])
    try:
        found = await cached.find(secret)
        stop()
        for now[0] in (31, 3599):
            assert await cached.find(secret) is found
            with pytest.raises(UnavailableError) as refused:
                await cached.find(new_secret())
            assert refused.value.status == 503
        now[0] = 3601
        with pytest.raises(UnavailableError):
            await cached.find(secret)
        start()
        now[0] = 3603
        assert (await cached.find(secret)).key_id == found.key_id
        assert await cached.find(new_secret()) is None
    finally:
        await cached.close()


def test_a_store_of_a_newer_schema_is_refused_at_the_start(newest_file, tmp_path: Path):
    shutil.copy(newest_file, tmp_path / "newer.db")
    with sqlite3.connect(tmp_path / "newer.db") as connection:
        connection.execute(f"UPDATE {SCHEMA_TABLE} SET version_num = '9999'")
    with pytest.raises(VersionMismatchError, match="newer llmops"):
        keys_required(GatewaySettings(store=f"sqlite:///{tmp_path}/newer.db"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "gateway.example"])
def test_other_hosts_are_refused_without_keys(host, newest_file, tmp_path: Path):
    shutil.copy(newest_file, tmp_path / "empty.db")
    for store, why in ((None, "it has no store of keys"), (f"sqlite:///{tmp_path}/empty.db", "its store has no keys")):
        with pytest.raises(InputError, match=f"{why}: make a key"):
            keys_required(GatewaySettings(host=host, store=store))
        assert not keys_required(GatewaySettings(host=host, store=store, open=True))
        assert not keys_required(GatewaySettings(host="::1", store=store))


def test_the_first_key_is_made_once(empty_url):
    from llmops.cli.stack import create_first_key as first_key

    assert is_secret(first_key(empty_url))
    assert first_key(empty_url) == ""
    assert keys_required(GatewaySettings(host="0.0.0.0", store=empty_url))


async def test_a_misspelt_name_is_compared_with_few_of_many(store, monkeypatch):
    """Before the fix, one misspelt address among 10,000 users blocked the event loop for two seconds."""
    compared: list[list[str]] = []
    match = difflib.get_close_matches

    def watched(word: str, known: Iterable[str], n: int) -> list[str]:
        compared.append(list(known))
        return match(word, compared[-1], n)

    monkeypatch.setattr(difflib, "get_close_matches", watched)
    async with store.write() as connection:
        await create_tenant(connection, "acme", Limits(), BY)
        for at in range(MAX_COMPARED + 50):
            await ensure_user(connection, "acme", f"ann{at}@acme.example", BY)
        await ensure_user(connection, "acme", "bertha@acme.example", BY)
        for address in ("ann@acme.example", "Bertah@acme.example"):
            with pytest.raises(UnknownResourceError, match="did you mean "):
                await require_user(connection, address)
    assert [len(one) for one in compared] == [MAX_COMPARED, 1]
    assert did_you_mean("acne", ["acme"] * 10_000) == " (did you mean acme?)"
    assert len(compared[-1]) == MAX_COMPARED
