"""The audit log: in the transaction of what it tells about, the newest first; on both databases."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from llmops.control.retention import prune_expired
from llmops.store.accounts.limits import Limits
from llmops.store.accounts.tenants import create_tenant, list_tenants
from llmops.store.audit import AuditContext, list_audit_entries, record_action
from llmops.store.dead_letters import DeadLetter, add_dead_letters, count_dead_letters


async def test_entries_come_newest_first_of_a_tenant_or_since_a_time(store, by):
    async with store.write() as connection:
        for number in range(4):
            who = replace(by, at=by.at + timedelta(seconds=number))
            await record_action(
                connection, who, "key.refused", f"key-{number}", ("acme", "zeta")[number % 2], {"n": number}
            )
    async with store.read() as connection:
        assert [one.detail["n"] for one in await list_audit_entries(connection)] == [3, 2, 1, 0]
        assert [one.detail["n"] for one in await list_audit_entries(connection, tenant_id="acme")] == [2, 0]
        assert [
            one.detail["n"] for one in await list_audit_entries(connection, since=by.at + timedelta(seconds=2))
        ] == [3, 2]
        [last] = await list_audit_entries(connection, limit=1)
    assert (last.created_at, last.actor, last.action, last.subject, last.tenant_id) == (
        by.at + timedelta(seconds=3), "cli:tester", "key.refused", "key-3", "zeta",
    )  # fmt: skip


async def test_what_was_undone_is_not_in_the_log(store, by):
    async def interrupted() -> None:
        async with store.write() as connection:
            await create_tenant(connection, "acme", Limits(), by)
            raise KeyError

    with pytest.raises(KeyError):
        await interrupted()
    async with store.read() as connection:
        assert (await list_tenants(connection), await list_audit_entries(connection)) == ([], [])


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
