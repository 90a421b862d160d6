"""Refusals in the audit log: counted, bounded, and kept while they cannot be written."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from llmops.errors import ResourceError
from llmops.gateway.auth.audit import FOUND, MAX_GROUPS, MAX_GROUPS_PER_ACTOR, OTHERS, AuditLog, CountingAudit
from llmops.gateway.http.request_context import RequestContext, anonymous_caller
from llmops.gateway.interfaces import Caller, Outcome

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


class Written(AuditLog):
    """An audit log that keeps its rows, and cannot be written while `away`."""

    def __init__(self) -> None:
        self.rows = []
        self.away = False
        self.asked = asyncio.Event()

    async def write(self, refusals):
        self.asked.set()
        if self.away:
            raise ResourceError("The store cannot be reached.")
        self.rows += refusals


@pytest.fixture
def audit() -> Written:
    return Written()


@pytest.fixture
async def refusals(audit: Written) -> CountingAudit:
    return CountingAudit(audit)


def asked_by(caller: Caller, route: str = "/v1/models") -> RequestContext:
    return RequestContext("req", route=route, caller=caller)


def counted(audit: Written) -> list[tuple]:
    return sorted((row.actor, row.subject, dict(row.details).get("status"), row.count) for row in audit.rows)


async def test_refusals_are_counted_by_who_where_and_what(audit):
    moments = iter(NOON + timedelta(seconds=at) for at in range(100))
    refusals = CountingAudit(audit, now=lambda: next(moments))
    stranger, colleague = anonymous_caller("10.0.0.7", "sk-x"), Caller("acme", "u", "key-a", "acme/key-a")
    for _ in range(3):
        refusals.note(asked_by(stranger), Outcome(401, "error"))
    refusals.note(asked_by(anonymous_caller("10.0.0.7", "other")), Outcome(401, "error"))
    refusals.note(asked_by(colleague, "/metrics"), Outcome(403, "error"))
    for status in (200, 404, 429, 500):
        refusals.note(asked_by(colleague), Outcome(status))
    # a route that is none is no refusal of a key
    for route in ("/v1/models", ""):
        refusals.note(asked_by(stranger, route), Outcome(404))
    await refusals.close()
    assert counted(audit) == [("address:10.0.0.7", "/v1/models", 401, 4), ("key:key-a", "/metrics", 403, 1)]
    mine = next(row for row in audit.rows if row.tenant_id == "acme")
    assert mine.first == mine.last == NOON + timedelta(seconds=4)
    storm = next(row for row in audit.rows if row.count == 4)
    assert (storm.first, storm.last) == (NOON, NOON + timedelta(seconds=3))


async def test_a_storm_from_everywhere_is_a_bounded_number_of_lines(audit, refusals):
    for at in range(10_000):
        refusals.note(asked_by(anonymous_caller(f"10.1.{at // 256}.{at % 256}", "")), Outcome(401, "error"))
    await refusals.close()
    assert (len(audit.rows), sum(row.count for row in audit.rows)) == (MAX_GROUPS + 1, 10_000)
    assert [row.count for row in audit.rows if row.actor == OTHERS] == [10_000 - MAX_GROUPS]


async def test_a_key_that_names_many_end_users_hides_no_one_elses_entries(audit, refusals):
    """Before the fix, 200 end users of one key made all later refusals and findings those of `others`."""
    for at in range(1000):
        refusals.note_finding(Caller("evil", "u", "key-e", "evil/key-e"), "secrets", category="s", end_user=f"u{at}")
    refusals.note_finding(Caller("acme", "u", "key-a", "acme/key-a"), "secrets", category="s", end_user="ann")
    refusals.note(asked_by(anonymous_caller("10.0.0.7", "")), Outcome(401, "error"))
    await refusals.close()
    assert len(audit.rows) == MAX_GROUPS_PER_ACTOR + 3
    assert sum(row.count for row in audit.rows if row.actor == "key:key-e") == 1000
    assert {row.actor for row in audit.rows} == {"key:key-e", "key:key-a", "address:10.0.0.7"}


async def test_what_cannot_be_written_is_counted_on(audit, caplog):
    audit.away = True
    refusals = CountingAudit(audit, window=0.001)
    for _ in range(2):
        audit.asked.clear()
        refusals.note(asked_by(anonymous_caller("10.0.0.7", "")), Outcome(401, "error"))
        await asyncio.wait_for(audit.asked.wait(), 60)
    assert not audit.rows
    audit.away = False
    await refusals.close()
    assert counted(audit) == [("address:10.0.0.7", "/v1/models", 401, 2)]
    assert "The store cannot be reached." in caplog.text


async def test_strangers_hide_no_callers_entries(audit, refusals):
    """Before the fix, five addresses that asked all routes made the findings of all tenants those of `others`."""
    for at in range(5 * MAX_GROUPS):
        refusals.note(asked_by(anonymous_caller(f"10.0.0.{at % 5}", ""), f"/{at}"), Outcome(401, "error"))
    refusals.note_finding(Caller("acme", "u", "key-a", "acme/key-a"), "secrets", category="s")
    await refusals.close()
    assert [(row.tenant_id, row.subject) for row in audit.rows if row.action == FOUND] == [("acme", "secrets")]
    assert len(audit.rows) == MAX_GROUPS + 2


async def test_keys_of_one_tenant_hide_no_other_tenants_findings(audit, refusals):
    """Before, ten keys of a tenant made the findings of all others those of `others`, of no tenant and no filter."""
    for at in range(20 * MAX_GROUPS):
        evil = Caller("evil", "u", f"key-{at % 20}", f"evil/key-{at % 20}")
        refusals.note_finding(evil, "secrets", end_user=f"u{at}")
    refusals.note_finding(Caller("acme", "u", "key-a", "acme/key-a"), "secrets", category="s")
    await refusals.close()
    assert [row.subject for row in audit.rows if row.tenant_id == "acme"] == ["secrets"]
    assert sum(row.count for row in audit.rows if row.tenant_id == "evil") == 20 * MAX_GROUPS
