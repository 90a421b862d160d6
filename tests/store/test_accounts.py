"""Tenants, users and keys, on both databases."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import select

from llmops.errors import InputError
from llmops.store.accounts.key_secrets import hash_secret, is_secret
from llmops.store.accounts.keys import (
    KeySpec,
    create_key,
    find_key,
    list_keys,
    require_key,
    revoke_key,
    rotate_key,
    update_key,
)
from llmops.store.accounts.limits import Budget, Limits
from llmops.store.accounts.tenants import (
    create_tenant,
    delete_tenant,
    find_tenant,
    list_tenants,
    require_tenant,
    restore_tenant,
    update_tenant,
)
from llmops.store.accounts.users import ensure_user, find_user, require_user
from llmops.store.audit import list_audit_entries
from llmops.store.tables import api_keys, users

LIMITS = Limits(rpm=60, tpm=90_000, concurrent=4, budget=Budget(50_000_000, "month"))


async def account(connection, by, email="user@acme.example", tenant="acme"):
    if await find_tenant(connection, tenant) is None:
        await create_tenant(connection, tenant, Limits(rpm=1000), by)
    return await ensure_user(connection, tenant, email, by, "pro")


async def test_a_key_is_found_by_its_hash_with_all_that_a_request_needs(store, by):
    until = by.at + timedelta(days=90)
    spec = KeySpec("ci", "pro", ("inference",), ("smollm2", "llama"), LIMITS, until)
    async with store.write() as connection:
        user = await account(connection, by)
        made, secret = await create_key(connection, user, spec, by)
    async with store.read() as connection:
        found = await find_key(connection, hash_secret(secret))
        assert await find_key(connection, hash_secret(secret + "x")) is None
    assert found == made
    assert (found.user_id, found.email, found.tenant_id) == (user.id, "user@acme.example", "acme")
    assert (found.spec, found.tenant_limits) == (spec, Limits(rpm=1000))
    assert (found.created_at, found.prefix) == (by.at, secret[:12])
    assert [found.state(until - timedelta(microseconds=1)), found.state(until)] == ["active", "expired"]


async def test_the_store_does_not_hold_the_key(store, by, url, kind):
    async with store.write() as connection:
        _, secret = await create_key(connection, await account(connection, by), KeySpec(), by)
    assert is_secret(secret)
    async with store.read() as connection:
        for table in (api_keys, users):
            assert secret not in str((await connection.execute(select(table))).all())
        assert secret not in str(await list_audit_entries(connection))
        # SHA-256 of the key, as sha256sum prints it
        assert await connection.scalar(select(api_keys.c.hash)) == hash_secret(secret)
        assert await connection.scalar(select(users.c.api_key_hash)) == hash_secret(secret)


def test_the_hash_is_sha256():
    # printf %s sk-llmops-00000000000000000000000000000000 | sha256sum
    expected = "bc4a4971e12c171814576b179989dfd4323d21f796a9f804efc152a9b65c1f3c"
    assert hash_secret("sk-llmops-" + "0" * 32) == expected


async def test_a_rotated_key_is_the_same_key_under_two_secrets_until_the_overlap_is_over(store, by):
    hour = timedelta(hours=1)
    async with store.write() as connection:
        key, first = await create_key(connection, await account(connection, by), KeySpec(limits=LIMITS), by)
        second = await rotate_key(connection, key, hour, by)
    async with store.read() as connection:
        old, new = [await find_key(connection, hash_secret(secret)) for secret in (first, second)]
    assert (old.id, new.id, old.spec, new.prefix) == (key.id, key.id, new.spec, second[:12])
    assert [old.state(by.at), old.state(by.at + hour), new.state(by.at + hour)] == ["active", "rotated", "active"]
    async with store.write() as connection:
        third = await rotate_key(connection, new, hour, by)
        assert await find_key(connection, hash_secret(first)) is None
        await revoke_key(connection, new, by)
        states = [(await find_key(connection, hash_secret(secret))).state(by.at) for secret in (second, third)]
        assert states == ["revoked", "revoked"]
        assert await connection.scalar(select(users.c.api_key_hash)) is None


async def test_a_revoked_key_is_neither_changed_nor_rotated(store, by):
    async with store.write() as connection:
        key, _ = await create_key(connection, await account(connection, by), KeySpec(), by)
        await revoke_key(connection, key, by)
        revoked = await require_key(connection, key.id)
        for attempt in (
            update_key(connection, revoked, KeySpec(tier="pro"), by),
            rotate_key(connection, revoked, timedelta(0), by),
            revoke_key(connection, revoked, by),
        ):
            with pytest.raises(InputError, match=f"{key.id} was revoked"):
                await attempt


async def test_an_update_is_kept_and_the_log_tells_what_changed(store, by):
    async with store.write() as connection:
        key, secret = await create_key(connection, await account(connection, by), KeySpec(limits=LIMITS), by)
        spec = replace(key.spec, limits=replace(LIMITS, rpm=None, budget=Budget(1, "day")), models=("m",))
        await update_key(connection, key, spec, by)
    async with store.read() as connection:
        assert (await find_key(connection, hash_secret(secret))).spec == spec
        logged = {entry.action: entry for entry in await list_audit_entries(connection, tenant_id="acme")}
    assert set(logged) == {"tenant.create", "user.create", "key.create", "key.update"}
    update = logged["key.update"]
    assert (update.actor, update.subject, update.created_at) == ("cli:tester", key.id, by.at)
    assert update.detail == {"rpm": None, "budget_micros": 1, "budget_period": "day", "models": ["m"]}


async def test_a_deleted_tenants_keys_are_refused_and_come_back_with_it(store, by):
    async with store.write() as connection:
        _, secret = await create_key(connection, await account(connection, by), KeySpec(), by)
        await delete_tenant(connection, "acme", by)
        assert (await find_key(connection, hash_secret(secret))).state(by.at) == "tenant deleted"
        assert (await list_tenants(connection), len(await list_tenants(connection, deleted=True))) == ([], 1)
        with pytest.raises(InputError, match="tenant restore acme"):
            await require_tenant(connection, "acme")
        with pytest.raises(InputError, match="The tenant acme already exists, deleted; `llmops tenant restore acme`"):
            await create_tenant(connection, "acme", Limits(), by)
        await restore_tenant(connection, "acme", by)
        assert (await find_key(connection, hash_secret(secret))).state(by.at) == "active"
        with pytest.raises(InputError, match="no deleted tenant acme"):
            await restore_tenant(connection, "acme", by)


async def test_a_tenants_limits(store, by):
    async with store.write() as connection:
        _, secret = await create_key(connection, await account(connection, by), KeySpec(), by)
        await update_tenant(connection, "acme", LIMITS, by)
        assert (await require_tenant(connection, "acme")).limits == LIMITS
        assert (await find_key(connection, hash_secret(secret))).tenant_limits == LIMITS


async def test_keys_are_listed_by_tenant_and_user(store, by):
    async with store.write() as connection:
        made = {}
        for tenant, email in [("zeta", "b@z.example"), ("acme", "b@a.example"), ("acme", "a@a.example")]:
            user = await account(connection, by, email, tenant)
            made[email] = (await create_key(connection, user, KeySpec(), by))[0]
        assert [key.email for key in await list_keys(connection)] == ["a@a.example", "b@a.example", "b@z.example"]
        assert [key.email for key in await list_keys(connection, "acme")] == ["a@a.example", "b@a.example"]
        mine = await list_keys(connection, user_id=made["b@z.example"].user_id)
        assert mine == [made["b@z.example"]]


async def test_an_address_is_one_user_of_one_tenant(store, by):
    async with store.write() as connection:
        user = await account(connection, by)
        assert await ensure_user(connection, "acme", "User@ACME.example", by, "free") == user
        assert await find_user(connection, "USER@acme.example") == user
        await create_tenant(connection, "other", Limits(), by)
        with pytest.raises(InputError, match=r"user@acme.example belongs to another tenant"):
            await ensure_user(connection, "other", "user@acme.example", by)


async def test_what_is_not_there_is_named_with_what_was_meant(store, by):
    async with store.write() as connection:
        await account(connection, by)
        with pytest.raises(InputError, match=r"no tenant acne \(did you mean acme\?\)"):
            await require_tenant(connection, "acne")
        with pytest.raises(InputError, match=r"no user usr@acme.example \(did you mean user@acme.example\?\)"):
            await require_user(connection, "usr@acme.example")
        with pytest.raises(InputError, match="no key key-nowhere"):
            await require_key(connection, "key-nowhere")
        secret = "sk-llmops-" + "a" * 32
        with pytest.raises(InputError) as refused:
            await require_key(connection, secret)
        assert secret not in refused.value.message


async def test_names_and_addresses_that_are_none(store, by):
    async with store.write() as connection:
        for name in ("", "Acme", "a" * 64, "-acme", "ac me", "acme\n", "../acme"):
            with pytest.raises(InputError, match="cannot name a tenant"):
                await create_tenant(connection, name, Limits(), by)
        await create_tenant(connection, "acme", Limits(), by)
        for email in ("acme", "@acme.example", "a b@acme.example", "a@" + "b" * 254, "a@b@c"):
            with pytest.raises(InputError, match="is not an e-mail address"):
                await ensure_user(connection, "acme", email, by)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Limits(rpm=0), "rpm 0: a limit is 1 to 1,000,000,000"),
        (lambda: Limits(tpm=-5), "tpm -5"),
        (lambda: Limits(concurrent=10**9 + 1), "concurrent 1000000001"),
        (lambda: Budget(0, "month"), r"more than \$0"),
        (lambda: Budget(10**15 + 1, "month"), r"at most \$1,000,000,000"),
        (lambda: Budget(1, "fortnight"), "cannot be per fortnight; write one of day, week, month"),
        (
            lambda: KeySpec(scopes=("inference", "root")),
            "no scope root; a key has one or more of inference, usage, metrics, admin",
        ),
        (lambda: KeySpec(scopes=()), "one or more of"),
        (lambda: KeySpec(tier="Gold!"), "is not a tier"),
        (lambda: KeySpec(name="x" * 101), "1 to 100 characters"),
        (lambda: KeySpec(models=("",)), "name is not empty"),
    ],
)
def test_what_no_key_can_have(make, said):
    with pytest.raises(InputError, match=said):
        make()


async def test_a_key_cannot_begin_expired(store, by):
    async with store.write() as connection:
        user = await account(connection, by)
        with pytest.raises(InputError, match="cannot expire in the past"):
            await create_key(connection, user, KeySpec(expires_at=by.at), by)
        key, _ = await create_key(connection, user, KeySpec(), by)
        with pytest.raises(InputError, match="cannot expire in the past"):
            await update_key(connection, key, KeySpec(expires_at=by.at - timedelta(days=1)), by)


@pytest.mark.parametrize(
    ("period", "begins"),
    # 22 November 2026 is a Sunday
    [("day", "2026-11-22"), ("week", "2026-11-16"), ("month", "2026-11-01")],
)
def test_periods_begin_at_midnight_utc(by, period, begins):
    assert Budget(1, period).begins(by.at).isoformat() == f"{begins}T00:00:00+00:00"


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("sk-llmops-" + "aZ9" * 10 + "00", True),
        ("sk-llmops-" + "a" * 31, False),
        ("sk-llmops-" + "a" * 33, False),
        ("sk-llmops-" + "a" * 31 + "-", False),
        ("sk-proj-" + "a" * 32, False),
        ("sk-llmops-" + "a" * 32 + "\n", False),
        ("sk-llmops-" + "ä" * 32, False),
    ],
)
def test_the_form_of_a_key(text, is_one):
    assert is_secret(text) is is_one
