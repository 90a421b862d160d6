"""Roll-outs in the store: a transition, its weights and its audit entry are one write, and a killed control goes on."""

import asyncio
import multiprocessing
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.control.rollouts import runner as runner_module
from llmops.control.rollouts.runner import RolloutRunner, _Canary, apply_event
from llmops.control.rollouts.schemas import RolloutSettings
from llmops.control.rollouts.state_machine import FINAL_STATES, RolloutEvent, RolloutState, transition
from llmops.errors import InputError, ResourceError, UnknownResourceError
from llmops.store import rollouts as table
from llmops.store.audit import AuditContext, list_audit_entries
from llmops.store.factory import open_store
from llmops.store.rollouts import ModelVersion, OutcomeBatch, Rollout, add_outcomes, list_versions, require_open_rollout
from tests.store.rollout_process import Replicas, carry_out_forever
from tests.support.waiting import stop_tasks, wait_until

NOW = datetime(2026, 11, 25, tzinfo=UTC)


def rollout(**settings) -> Rollout:
    data = RolloutSettings(**settings).data()
    return Rollout("1", "llama", table.INITIAL_VERSION, "v2", RolloutState.STARTING, NOW, NOW, "llama", settings=data)


async def start(connection, name: str, by: AuditContext, **settings) -> Rollout:
    candidate, data = ModelVersion("llama", name, engine="/engine"), RolloutSettings(**settings).data()
    return await table.create_rollout(connection, candidate, RolloutState.STARTING, data, by)


def test_an_impossible_event_says_what_is_possible():
    with pytest.raises(InputError, match="starting, so the event 'promote' is impossible; wait until"):
        transition(rollout(), RolloutEvent.PROMOTE, NOW)


@given(st.lists(st.sampled_from(RolloutEvent), max_size=30))
def test_only_a_rollback_lowers_the_weight_and_final_states_are_final(events):
    current = rollout()
    for event in events:
        try:
            following = transition(current, event, NOW)
        except InputError:
            continue
        assert current.is_open
        assert following.percent >= current.percent or following.state == RolloutState.ROLLING_BACK
        assert following.is_open == (following.state not in FINAL_STATES)
        current = following


async def test_weights_versions_and_audit_follow_from_each_transition(store, by):
    async with store.write() as connection:
        await start(connection, "v2", by)
        open_ = await require_open_rollout(connection, "llama")
        await apply_event(connection, open_, RolloutEvent.READY, by, "ready after 3 s")
    async with store.read() as connection:
        assert [(one.name, one.weight) for one in await list_versions(connection)] == [("initial", 95), ("v2", 5)]
        (entry,) = await list_audit_entries(connection, action="rollout.shifting", subject="llama")
    assert (entry.actor, entry.action, entry.detail["reason"]) == ("cli:tester", "rollout.shifting", "ready after 3 s")
    # of two processes that read the same state one fails, and changes nothing
    async with store.write() as connection:
        with pytest.raises(ResourceError, match="changed meanwhile"):
            await apply_event(connection, open_, RolloutEvent.ROLLBACK, by)
    async with store.read() as connection:
        assert sum(one.weight for one in await list_versions(connection)) == 100


async def test_a_second_rollout_of_a_model_is_refused(store, by):
    async with store.write() as connection:
        await start(connection, "v2", by)
    with pytest.raises(InputError, match="A roll-out of llama is in progress"):
        async with store.write() as connection:
            await start(connection, "v3", by)
    async with store.read() as connection:
        assert {one.name for one in await list_versions(connection)} == {"initial", "v2"}
        with pytest.raises(UnknownResourceError, match="mistral has no roll-out in progress"):
            await require_open_rollout(connection, "mistral")


def outcomes(version: str, count: int, ok: bool = True) -> list[dict]:
    one = {"ttft_s": 0.1, "tpot_s": 0.01, "prompt_tokens": 10, "output_tokens": 10}
    return [{"version": version, "ok": ok, "good": ok, **one} for _ in range(count)]


def interleaved(stable: str, candidate: str) -> list[dict]:
    """200 requests of each version at the same time: the judge compares a request with those around it."""
    return [one for pair in zip(outcomes(stable, 200), outcomes(candidate, 200), strict=True) for one in pair]


async def begin(url: str, **settings) -> None:
    by = AuditContext("cli:tester", datetime.now(UTC))
    async with await open_store(url) as store, store.write() as connection:
        await start(connection, f"v{time.monotonic_ns()}", by, auto=True, keep_old=0, min_seconds=0, **settings)


async def latest(url: str) -> tuple[Rollout, float]:
    async with await open_store(url, pool_size=1) as store, store.read() as connection:
        (found, *_) = await table.list_rollouts(connection, "llama")
        return found, sum(one.weight for one in await list_versions(connection, "llama"))


async def carry_out(url: str, until: Callable[[Rollout], bool], rows: Sequence[dict] = ()) -> Rollout:
    """Run the job until the roll-out is in a state, with outcomes for each step."""
    job = asyncio.create_task(RolloutRunner(url, Replicas(), tick=0.01, weights_delay=0).run())
    fed = -1
    try:
        async with asyncio.timeout(60):
            while True:
                found, total = await latest(url)
                assert total == 100
                if until(found):
                    return found
                if rows and found.state == RolloutState.SHIFTING and found.revision != fed:
                    fed = found.revision
                    names = {"stable": found.stable, "candidate": found.candidate}
                    named = [one | {"version": names[one["version"]]} for one in rows]
                    async with await open_store(url) as store:
                        # the first is from a gateway whose clock is ahead
                        for part, hours in ((named[:1], 1), (named[1:], 0)):
                            async with store.write() as connection:
                                at = datetime.now(UTC) + timedelta(hours=hours)
                                await add_outcomes(connection, "llama", part, at)
                            await asyncio.sleep(0.05)
                await asyncio.sleep(0.01)
    finally:
        await stop_tasks(job)


async def test_the_job_promotes_a_healthy_canary_and_forgets_its_outcomes(url):
    await begin(url, min_requests=30, percent=50)
    found = await carry_out(url, lambda one: not one.is_open, interleaved("stable", "candidate"))
    assert (found.state, found.percent) == ("promoted", 100)
    async with await open_store(url) as store, store.read() as connection:
        states = {one.name: (one.weight, one.state) for one in await list_versions(connection)}
        actions = [entry.action for entry in await list_audit_entries(connection, action="rollout.")]
    assert states == {"initial": (0, "retired"), found.candidate: (100, "active")}
    assert actions[::-1] == [f"rollout.{verb}" for verb in ("start", "shifting", "keeping", "retiring", "promoted")]


async def test_a_twin_gets_as_many_requests_as_the_candidate_and_is_judged_in_place_of_the_stable_version(url):
    await begin(url, twin=True, analysis=("up < 1",), prometheus="http://127.0.0.1:9")
    found = await carry_out(url, lambda one: one.state == RolloutState.SHIFTING and one.verdict is not None)
    async with await open_store(url) as store:
        async with store.read() as connection:
            weights = {one.name: one.weight for one in await list_versions(connection)}
        assert weights == {"initial": 90, "initial-twin": 5, found.candidate: 5}
        assert "the twin" in {row["note"] for row in found.verdict["rows"]}
        assert "does not answer" in found.verdict["reason"]
        async with store.write() as connection:
            by = AuditContext("cli:tester", datetime.now(UTC))
            await apply_event(connection, await require_open_rollout(connection, "llama"), RolloutEvent.ROLLBACK, by)
    await carry_out(url, lambda one: not one.is_open)
    async with await open_store(url) as store, store.read() as connection:
        states = {one.name: (one.weight, one.state) for one in await list_versions(connection)}
    assert states == {"initial": (100, "active"), "initial-twin": (0, "retired"), found.candidate: (0, "retired")}


async def test_the_job_rolls_a_failing_canary_back(url):
    await begin(url, percent=50)
    failing = outcomes("stable", 300) + outcomes("candidate", 60, ok=False)
    found = await carry_out(url, lambda one: not one.is_open, failing)
    assert (found.state, found.percent) == ("rolled back", 0)
    assert "rror" in found.reason, found.reason


async def test_replicas_that_do_not_start_end_the_rollout(url):
    class Broken(Replicas):
        async def start(self, candidate, stable, settings, twin):
            raise InputError("No GPU is free.")

    await begin(url)
    job = asyncio.create_task(RolloutRunner(url, Broken(), tick=0.01, weights_delay=0).run())
    async with asyncio.timeout(30):
        while (found := (await latest(url))[0]).is_open:
            await asyncio.sleep(0.02)
    job.cancel()
    assert found.state == "rolled back"
    assert "could not be started: No GPU is free." in found.reason


async def test_a_receiver_gets_each_transition(url, monkeypatch):
    monkeypatch.setattr(runner_module, "notify_webhook", notify := AsyncMock())
    await begin(url)
    await carry_out(url, lambda one: one.state == RolloutState.SHIFTING)
    assert [(changed.state, actor) for (changed, actor), _ in notify.call_args_list] == [("shifting", "control")]


def read_file(path: Path) -> tuple[str, str, str, bool]:
    """The state, the two versions and whether the latest roll-out is open, after a look at the weights."""
    with closing(sqlite3.connect(path)) as connection:
        (total,) = connection.execute("select sum(weight) from model_versions").fetchone()
        assert total == 100
        newest = "select state, stable, candidate, open_model from rollouts order by started_at desc limit 1"
        state, stable, candidate, open_model = connection.execute(newest).fetchone()
    return state, stable, candidate, open_model is not None


async def feed(url: str, stable: str, candidate: str) -> None:
    async with await open_store(url, pool_size=1) as store, store.write() as connection:
        await add_outcomes(connection, "llama", interleaved(stable, candidate), datetime.now(UTC))


def test_a_control_that_is_killed_in_each_state_goes_on_from_the_store(tmp_path):
    """The next process goes on in the state that the last one has written; LLMOPS_KILLS=100 for the figure of docs."""
    path = tmp_path / "store.db"
    url, wanted = f"sqlite:///{path}", int(os.environ.get("LLMOPS_KILLS", "9"))
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.store.rollout_process"])
    killed_in: Counter[str] = Counter()
    # a busy machine may pass a state between two looks at the file
    needed = {"shifting", "keeping", "promoted"}
    while killed_in.total() < wanted or (not needed <= set(killed_in) and killed_in.total() < 20 * wanted):
        asyncio.run(begin(url, min_requests=30, percent=50))
        state, stable, candidate, is_open = read_file(path)
        while is_open:
            if state == RolloutState.SHIFTING:
                asyncio.run(feed(url, stable, candidate))
            # a server without threads forks: a process with threads may fork a lock that is held
            process = multiprocessing.get_context("forkserver").Process(target=carry_out_forever, args=(url,))
            process.start()
            try:
                wait_until(lambda before=state: read_file(path)[0] != before, f"a move from {state}")
                # 0 to 8 ms later: before, within and after the next transaction
                time.sleep(0.002 * (killed_in.total() % 5))
            finally:
                process.kill()
                process.join()
            state, _, _, is_open = read_file(path)
            killed_in[state] += 1
        assert state == RolloutState.PROMOTED
    assert needed <= set(killed_in), killed_in


async def test_many_outcomes_leave_turns_to_other_tasks() -> None:
    """Before the fix, the outcomes of ten minutes blocked the event loop of a new leader for four seconds."""
    turns: list[int] = []
    judge = Mock(observe=lambda _outcome: turns.append(ran))
    ran = 0

    async def other() -> None:
        nonlocal ran
        while True:
            await asyncio.sleep(0)
            ran += 1

    canary = _Canary(judge, Mock(), NOW, revision=1)
    task = asyncio.create_task(other())
    await canary.observe([OutcomeBatch(str(at), NOW, [{"version": "v2", "ok": True}] * 3) for at in range(9)], NOW)
    await stop_tasks(task)
    assert len(turns) == 27
    assert len(set(turns)) == 9


async def test_more_batches_of_outcomes_than_one_query_reads_are_judged(url, monkeypatch):
    """Before the fix, the judge read the same 500 batches again and again where 120 processes wrote one a second."""
    monkeypatch.setattr(table, "OUTCOME_BATCHES", 5)
    runner = RolloutRunner(url, None)  # type: ignore[arg-type]
    async with await open_store(url, pool_size=2) as runner._store:
        async with runner._store.write() as connection:
            await table.create_rollout(connection, ModelVersion("llama", "v2"), "shifting", {}, AuditContext("", NOW))
            for at in range(30):
                await add_outcomes(connection, "llama", outcomes("v2", 1), NOW + timedelta(seconds=at / 4))
        for _ in range(30):
            await runner.look()
    (judged, _) = await latest(url)
    assert judged.verdict["rows"][0]["canary"] == 30
