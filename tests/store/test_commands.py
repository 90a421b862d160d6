"""`llmops key`, `tenant`, `price`, `usage`, `audit` as a user types them.

On both databases where a key is made and its usage read; the queries behind the others are tested on both apart. Most
of it twice: on a store, and with --url through an admin API in front of the same store.
"""

import asyncio
import csv
import io
import json
import os
import pwd
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from uuid import UUID

import pytest
from click.testing import CliRunner

from llmops.cli.accounts.param_types import micro_dollars
from llmops.cli.main import cli
from llmops.control.app import Control
from llmops.control.store_access import SharedStore
from llmops.errors import LlmopsError
from llmops.gateway.http.error_handlers import add_exception_handlers
from llmops.gateway.http.middleware import Check, GatewayApp
from llmops.gateway.http.server import DrainingServer, bind, uvicorn_config
from llmops.gateway.interfaces import Caller
from llmops.gateway.settings import GatewaySettings
from llmops.store.accounts.key_secrets import hash_secret, is_secret
from llmops.store.accounts.keys import find_key
from llmops.store.audit import AuditContext, record_action
from llmops.store.factory import open_store
from llmops.store.usage_writes import UsageRecord
from tests.support.usage_rows import fill


@dataclass
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self):
        assert self.code == 0, self.err
        return json.loads(self.out)


class AsAdmin(Check):
    """Everybody is an admin whose key is in no store."""

    async def before(self, scope, context):
        context.caller = Caller(tenant_id="ops", key_id="key-admin", scopes=frozenset({"admin"}))


@contextmanager
def served(url: str) -> Iterator[str]:
    """The URL of an admin API on the store at `url`."""
    settings, app = GatewaySettings(store=url), GatewayApp(checks=[AsAdmin()])
    add_exception_handlers(app)
    Control(SharedStore(url), tuple, None, settings).add_to(app)
    listener = bind("127.0.0.1", 0)
    server = DrainingServer(uvicorn_config(app, settings), lambda: None)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture
def through() -> str:
    return "store"


BOTH = pytest.mark.parametrize("through", ["store", "url"])


@pytest.fixture
def llmops(url, through, monkeypatch):
    """Runs a command on the store, as `main` does; a bug keeps its traceback."""
    monkeypatch.setenv("LLMOPS_STORE", url)
    monkeypatch.delenv("COLUMNS", raising=False)
    with served(url) if through == "url" else nullcontext("") as asked:
        yield partial(_run, ("--url", asked) if asked else ())


def _run(added: tuple[str, ...], *arguments: str) -> Said:
    result = CliRunner().invoke(cli, [*arguments, *added])
    if isinstance(result.exception, LlmopsError):
        return Said(result.exception.exit_code, result.stdout, result.exception.message)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Said(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def acme(llmops):
    assert llmops("tenant", "create", "acme", "--rpm", "1,000").out == "acme: 1,000 requests/min, no budget.\n"
    return llmops


CREATE = ("key", "create", "--tenant", "acme", "--user", "user@acme.example")


def found(url: str, secret: str):
    async def find():
        async with await open_store(url) as store, store.read() as connection:
            return await find_key(connection, hash_secret(secret))

    return asyncio.run(find())


@BOTH
def test_a_key_is_made_and_printed_once(acme, url):
    made = acme(
        *CREATE, "--tier", "pro", "--rpm", "60", "--tpm", "90000", "--budget", "50/month", "--expires", "90d",
        "--models", "smollm2,llama", "--scopes", "inference",
    )  # fmt: skip
    secret = made.out.strip()
    # the key alone on standard output, for KEY=$(llmops key create …)
    assert is_secret(secret)
    assert "60 requests/min, 90,000 tokens/min, $50.00/month, for inference, only smollm2, llama" in made.err
    key = found(url, secret)
    spec = key.spec
    assert (spec.limits.rpm, spec.limits.tpm, spec.limits.concurrent) == (60, 90_000, None)
    assert vars(spec.limits.budget) == {"micros": 50_000_000, "period": "month"}
    assert (spec.tier, spec.scopes, spec.models) == ("pro", ("inference",), ("smollm2", "llama"))
    assert timedelta(days=89, hours=23) < spec.expires_at - datetime.now(UTC) <= timedelta(days=90)
    for command in (("key", "list", "--json"), ("key", "list"), ("key", "show", key.id), ("key", "show", secret)):
        shown = acme(*command)
        assert key.id in shown.out
        assert secret not in shown.out
        assert secret[:12] in shown.out


@BOTH
@pytest.mark.parametrize("kind", ["sqlite"])
def test_a_second_key_of_the_same_user_has_the_users_tier(acme):
    acme(*CREATE, "--tier", "pro")
    second = acme(*CREATE, "--json").json
    assert [second[name] for name in ("tier", "scopes", "models", "expires_at")] == ["pro", ["inference"], None, None]
    assert is_secret(second["key"])
    assert [key["user"] for key in acme("key", "list", "--json").json] == ["user@acme.example"] * 2


@BOTH
@pytest.mark.parametrize("kind", ["sqlite"])
def test_update_changes_what_is_named_and_none_takes_away(acme):
    key = acme(*CREATE, "--rpm", "60", "--budget", "$0.5/day", "--models", "a,b", "--expires", "30d", "--json").json
    after = acme("key", "update", key["id"], "--tpm", "10", "--rpm", "none", "--json").json
    assert after == {name: value for name, value in key.items() if name != "key"} | {"rpm": None, "tpm": 10}
    gone = acme("key", "update", key["id"], "--budget", "none", "--models", "all", "--expires", "never", "--json").json
    assert gone == after | {"budget": None, "models": None, "expires_at": None}
    assert acme("key", "update", key["id"]).err.endswith("Nothing to change; give an option, e.g. --rpm 120.\n")


@BOTH
@pytest.mark.parametrize("kind", ["sqlite"])
def test_rotate_and_revoke(acme, url):
    first = acme(*CREATE).out.strip()
    now = datetime.now(UTC)
    second = acme("key", "rotate", first, "--overlap", "1h").out.strip()
    assert [found(url, one).state(now) for one in (first, second)] == ["active", "active"]
    third = acme("key", "rotate", second, "--overlap", "0").out.strip()
    assert found(url, first) is None
    assert [found(url, one).state(datetime.now(UTC)) for one in (second, third)] == ["rotated", "active"]
    assert "is revoked; its usage stays on the bill" in acme("key", "revoke", third).out
    assert "was revoked" in acme("key", "revoke", third).err
    assert acme("key", "list").err.startswith("No keys. Make one:")
    assert [key["state"] for key in acme("key", "list", "--all", "--json").json] == ["revoked"]


@BOTH
@pytest.mark.parametrize("kind", ["sqlite"])
def test_a_tenant_from_beginning_to_end(acme):
    updated = acme("tenant", "update", "acme", "--rpm", "none", "--budget", "500/month").out
    assert updated == "acme: no limit, $500.00/month.\n"
    assert "500.00/month" in acme("tenant", "show", "acme").out
    key = acme(*CREATE, "--json").json
    budget = acme("key", "show", key["id"], "--json").json["tenant_limits"]["budget"]
    assert budget == {"usd": 500.0, "micros": 500_000_000, "period": "month"}
    acme("tenant", "delete", "acme")
    assert acme("key", "show", key["id"], "--json").json["state"] == "tenant deleted"
    assert acme(*CREATE).err == "The tenant acme was deleted; `llmops tenant restore acme` brings it back."
    assert acme("tenant", "list", "--json").json == []
    assert acme("tenant", "list", "--all", "--json").json[0]["deleted_at"]
    acme("tenant", "restore", "acme")
    assert acme("key", "show", key["id"], "--json").json["state"] == "active"
    acme("key", "update", key["id"], "--budget", "0.0005/day")
    recorded = acme("audit").out
    assert "rpm none, tpm none, concurrent none, budget $500.00/month" in recorded
    assert "budget $0.0005, budget_period day" in recorded


@BOTH
@pytest.mark.parametrize("kind", ["sqlite"])
def test_refusals_hide_no_change_in_the_audit(acme, url):
    """Before the fix, a minute of refusals of 200 addresses filled the 100 lines that the command shows."""

    async def refuse() -> None:
        async with await open_store(url, pool_size=1) as store, store.write() as connection:
            for number in range(150):
                by = AuditContext(f"address:127.0.1.{number}", datetime.now(UTC) + timedelta(minutes=1))
                await record_action(connection, by, ("access.refused", "safety.found")[number % 2], "/v1/models")

    asyncio.run(refuse())
    assert [entry["action"] for entry in acme("audit", "--json").json] == ["tenant.create"]
    assert len(acme("audit", "--all", "--json").json) == 100
    assert {entry["action"] for entry in acme("audit", "--action", "safety", "--json").json} == {"safety.found"}
    assert acme("audit", "--tenant", "other").err.startswith("No change is on record; --all shows")


@BOTH
@pytest.mark.parametrize("kind", ["sqlite"])
def test_prices(llmops):
    said = llmops("price", "set", "smollm2", "--input", "0.6", "--cached", "0.3", "--output", "0.9")
    assert said.out.startswith("smollm2: $0.60 in, $0.30 cached, $0.90 out per million tokens, from 2")
    assert said.out.endswith(" UTC. Gateways read it within 30 s.\n")
    llmops("price", "set", "smollm2", "--input", "0.5", "--output", "$0.8", "--from", "2100-01-01")
    _, later = llmops("price", "list", "--json").json
    assert (later["from"], later["cached"]) == ("2100-01-01T00:00:00Z", 0.5)
    assert llmops("price", "list", "--at", "2100-06-01", "--json").json == [later | {"in_force": True}]
    listed = llmops("price", "list").out.splitlines()
    assert [line.rstrip().endswith("in force") for line in listed] == [False, True, False]
    late = llmops("price", "set", "smollm2", "--input", "1", "--output", "1", "--from", "2020-01-01")
    assert (late.code, "cannot begin in the past" in late.err) == (2, True)
    # before the fix, a budget reserved 60 cents for a request that cost 30 dollars
    dear = llmops("price", "set", "smollm2", "--input", "0.6", "--cached", "30", "--output", "1")
    assert (dear.code, "cannot cost more than other prompt tokens" in dear.err) == (2, True)


@BOTH
def test_usage_in_every_form(acme, url):
    key = acme(*CREATE, "--budget", "1/month", "--json").json
    user_id = found(url, key["key"]).user_id
    day = datetime(2026, 11, 5, 12, tzinfo=UTC)

    events = []
    for n in range(5):
        at, model = day + timedelta(days=n % 2), ("m1", "m2")[n % 2]
        counts = {"input_tokens": 100, "cached_tokens": 40, "output_tokens": 10, "cost_micros": 7}
        events.append(UsageRecord(str(UUID(int=n)), "g1", n, at, "r", user_id, model, **counts, key_id=key["id"]))
    asyncio.run(fill(url, *events))
    november = ("--from", "2026-11-01", "--to", "2026-11-30")
    total = acme("usage", *november, "--tenant", "acme", "--json").json
    assert total["period"] == {"from": "2026-11-01", "to": "2026-11-30"}
    counts = [total[f"{name}_tokens"] for name in ("input", "cached", "output")]
    assert (total["requests"], counts, total["cost_micros"], total["cost_usd"]) == (5, [500, 200, 50], 35, 0.000035)
    lines = [(line["tenant"], line["model"], line["requests"]) for line in total["lines"]]
    assert lines == [("acme", "m1", 3), ("acme", "m2", 2)]
    rows = list(csv.DictReader(io.StringIO(acme("usage", *november, "--by", "day", "--by", "key", "--csv").out)))
    days = [(row["day"], row["key"], row["cost_micros"]) for row in rows]
    assert days == [("2026-11-05", key["id"], "21"), ("2026-11-06", key["id"], "14")]
    table = acme("usage", *november, "--by", "user").out.splitlines()
    assert table[0] == "2026-11-01 to 2026-11-30 (UTC)"
    assert table[-1].split() == ["total", "5", "500", "200", "50", "$0.000035"]
    assert acme("usage", "--from", "2026-11-06", "--to", "2026-11-06", "--json").json["requests"] == 2
    assert acme("usage", *november, "--model", "m3").err == "No usage, 2026-11-01 to 2026-11-30 (UTC).\n"
    acme("tenant", "delete", "acme")
    assert acme("usage", *november, "--tenant", "acme", "--user", "user@acme.example", "--json").json["requests"] == 5


SCOPES, PAST = "inference, usage, metrics, admin, fairness", "2020-01-01"
REFUSED_KEYS = [
    (("--tenant", "acne"), r"There is no tenant acne (did you mean acme?); `llmops tenant create acne` makes one."),
    (("--user", "nobody"), "'nobody' is not an e-mail address; write one such as ann@example.com."),
    (("--rpm", "-5"), "rpm cannot be -5: a limit is 1 to 1,000,000,000; to stop a key, revoke it; to stop a tenant"),
    (("--rpm", "0"), "rpm cannot be 0: a limit is 1 to"),
    (("--tpm", "99999999999999999999"), "tpm cannot be 99999999999999999999: a limit is 1 to 1,000,000,000"),
    (("--concurrent", "many"), "'many' is not a limit; write a whole number, or none for no limit."),
    (("--rpm", "1.5"), "'1.5' is not a limit; write a whole number"),
    (("--budget", "50"), "'50' is not a budget; write US dollars per day, week or month, e.g. 50/month, or none."),
    (("--budget", "50EUR/month"), "'50EUR/month' is not a budget; write US dollars"),
    (("--budget", "50/fortnight"), "'50/fortnight' is not a budget"),
    (("--budget", "-1/day"), "'-1/day' is not a budget"),
    (("--budget", "0/day"), "A budget is more than $0"),
    (("--budget", "1e99/day"), "'1e99/day' is not a budget"),
    (("--budget", "2000000000/day"), "at most $1,000,000,000"),
    (("--scopes", "inference,root"), f"no scope root; a key has one or more of {SCOPES}."),
    (("--scopes", ","), "',' is not a list of names"),
    (("--expires", "soon"), "'soon' is not a time; write 90d or 12h from now, or a date (UTC) such as 2027-01-31."),
    (("--expires", "90"), "'90' is not a time"),
    (("--expires", "99999d"), "'99999d' is not a time"),
    (("--expires", PAST), f"A key cannot expire in the past ({PAST} 00:00 UTC); give a later time, or never."),
    (("--tier", "Gold!"), "'Gold!' is not a tier"),
]
REFUSED = [
    *(((*CREATE, *given), said) for given, said in REFUSED_KEYS),
    (("price", "set", "m", "--input", "-1", "--output", "1"), "'-1' is not an amount; write US dollars"),
    (("price", "set", "m", "--input", "0.0000001", "--output", "1"), "with at most six decimals"),
    (("price", "set", "m", "--input", "1000001", "--output", "1"), "A price is $0 to $1,000,000 per million tokens;"),
    (("price", "set", "m", "--input", "1", "--output", "free"), "'free' is not an amount"),
    (("usage", "--user", "who@acme.example"), "There is no user who@acme.example; "),
    (("usage", "--tenant", "zeta"), "There is no tenant zeta; "),
    (("usage", "--key", "key-none"), "There is no key key-none; "),
    (("usage", "--from", "yesterday"), "'yesterday' is not a day; write 2026-11-30."),
    (
        ("usage", "--from", "2026-02-02", "--to", "2026-02-01"),
        "A period from 2026-02-02 to 2026-02-01 ends before it begins; swap the two days.",
    ),
    (("usage", "--json", "--csv"), "--json and --csv exclude each other; give one of them."),
    (("tenant", "create", "acme"), "The tenant acme already exists; `llmops tenant update acme` changes it."),
    (("tenant", "update", "acme"), "Nothing to change"),
    (("key", "rotate", "key-none", "--overlap", "1y"), "'1y' is not a duration of at most ten years"),
    (("key", "list", "--store", "mysql://u:hunter2@h/d"), "The store cannot be mysql; write sqlite:///FILE"),
]


@BOTH
@pytest.mark.parametrize("kind", ["sqlite"])
def test_what_cannot_be_is_one_sentence(acme, through):
    for arguments, said in REFUSED:
        refused = acme(*arguments)
        if through == "url" and "--store" in arguments:
            said = "--store and --url exclude each other; give one of them."
        assert (refused.code, refused.out, said in refused.err) == (2, "", True), (arguments, refused)
        assert "hunter2" not in refused.err
    assert acme("key", "list", "--all", "--json").json == []


@contextmanager
def somebody_else() -> Iterator[None]:
    """Run the block as another user than root, for whom the modes of files mean nothing."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(pwd.getpwnam("nobody").pw_uid)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("kind", ["sqlite"])
def test_a_file_that_may_only_be_read(acme, folder):
    assert len(acme("tenant", "list", "--json").json) == 1
    (folder / "store.db").chmod(0o444)
    folder.chmod(0o555)
    with somebody_else():
        refused = acme("tenant", "create", "zeta")
    folder.chmod(0o755)
    why = "the file or its folder is read-only for this user; give the user the right to write."
    assert (refused.code, refused.err) == (1, f"The store {folder}/store.db cannot be written: {why}")


@pytest.mark.parametrize(
    ("text", "micros"),
    [("0.6", 600_000), (".5", 500_000), ("50", 50_000_000), ("0.000001", 1), ("0.0000010", 1), ("0.0000001", None),
     ("", None), ("1,000", None), ("1e3", None), ("nan", None), ("-1", None), ("9" * 21, None)],
)  # fmt: skip
def test_dollars_are_read_exactly(text, micros):
    assert micro_dollars(text) == micros
