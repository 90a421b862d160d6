"""A gateway's keys in a real PostgreSQL, which goes away and comes back; stores that a gateway cannot start with."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import make_url

from llmops.errors import InputError, VersionMismatchError
from llmops.gateway.auth.authentication import keys_required
from llmops.gateway.auth.credential_cache import CachedDirectory
from llmops.gateway.auth.keys import KeyDirectory
from llmops.gateway.errors import UnavailableError
from llmops.gateway.settings import GatewaySettings
from llmops.store.accounts.key_secrets import is_secret, new_secret
from llmops.store.accounts.keys import KeySpec, create_key
from llmops.store.accounts.limits import Limits
from llmops.store.accounts.tenants import create_tenant
from llmops.store.accounts.users import ensure_user
from llmops.store.factory import open_store
from llmops.store.tables import SCHEMA_TABLE


async def make_key(url: str, by) -> str:
    async with await open_store(url) as store, store.write() as connection:
        await create_tenant(connection, "acme", Limits(), by)
        user = await ensure_user(connection, "acme", "ann@acme", by)
        _, secret = await create_key(connection, user, KeySpec(models=("tiny",)), by)
    return secret


async def test_keys_are_found_in_either_database(url, by):
    secret = await make_key(url, by)
    directory = KeyDirectory(url)
    try:
        found = await directory.find(secret)
        assert (found.tenant_id, found.models, found.share) == ("acme", {"tiny"}, f"acme/{found.key_id}")
        assert await directory.find(new_secret()) is None
        assert await directory.has_credentials()
    finally:
        await directory.close()


async def test_a_postgresql_that_is_killed_leaves_the_keys_in_use(own_postgres, by):
    url, stop, start = own_postgres
    secret = await make_key(url, by)
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


def test_a_wrong_password_is_one_sentence_at_the_start(postgres):
    wrong = make_url(postgres).set(password="secretpw").render_as_string(hide_password=False)
    with pytest.raises(InputError, match="refuses this user or password") as refused:
        keys_required(GatewaySettings(store=wrong))
    assert refused.value.exit_code == 2
    assert "secretpw" not in str(refused.value) + repr(GatewaySettings(store=wrong))


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

    secret = first_key(empty_url)
    assert is_secret(secret)
    assert first_key(empty_url) == ""
    assert keys_required(GatewaySettings(host="0.0.0.0", store=empty_url))
