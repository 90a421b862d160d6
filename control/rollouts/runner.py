"""The leader's job that carries out roll-outs.

The store holds the whole state of a roll-out. A runner that takes over after a crash starts the
work of the current state again, so all work must be idempotent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import httpx
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.background import LogOnce, cancel_tasks, every
from llmops.clocks import utc_now
from llmops.control.leader_jobs import LeaderJob
from llmops.control.rollouts.analysis import Analysis, AnalysisResult
from llmops.control.rollouts.judge import CanaryJudge, JudgeSettings, RequestOutcome, Verdict
from llmops.control.rollouts.schemas import RolloutSettings
from llmops.control.rollouts.state_machine import RolloutEvent, RolloutState, transition
from llmops.control.rollouts.version_replicas import VersionReplicas
from llmops.errors import InputError, LlmopsError, ResourceError
from llmops.input_files import MALFORMED
from llmops.store import rollouts
from llmops.store.audit import AuditContext
from llmops.store.factory import LazyStore
from llmops.store.rollouts import ModelVersion, OutcomeBatch, Rollout
from llmops.untrusted_text import escape_unsafe
from llmops.urls import failure_reason, refuse_metadata_address

log = logging.getLogger(__name__)

#: Seconds between two looks at the roll-outs.
TICK = 0.5
#: Seconds after which every gateway has read new weights from the store.
WEIGHTS_DELAY = 3.0
#: Maximum seconds by which a batch of outcomes may be written later than a newer batch.
LATE_BATCH = 5.0
#: Time before the current step from which a new process reads outcomes, so that its judge knows the
#: stable version.
RESUMED_TIME = timedelta(minutes=10)
#: Maximum seconds for a webhook's receiver to answer, because the roll-outs wait meanwhile.
WEBHOOK_TIMEOUT = 5.0
ACTOR = "control"
#: Events that a verdict causes. The verdict "continue" causes none.
_EVENTS = {"rollback": RolloutEvent.FAILED, "promote": RolloutEvent.PASSED}
_OUTCOME_FIELDS = frozenset(RequestOutcome.__dataclass_fields__)


async def notify_webhook(rollout: Rollout, actor: str) -> None:
    """Send a transition to the roll-out's webhook. If that fails, log a warning."""
    url = RolloutSettings.of(rollout).webhook
    if not url:
        return
    names = ("id", "model", "stable", "candidate", "state", "percent", "reason", "revision")
    body = {name: getattr(rollout, name) for name in names} | {"actor": actor, "at": rollout.changed_at.isoformat()}
    try:
        async with (
            asyncio.timeout(WEBHOOK_TIMEOUT),
            httpx.AsyncClient(timeout=WEBHOOK_TIMEOUT, event_hooks={"request": [refuse_metadata_address]}) as client,
            client.stream("POST", url, json=body) as response,  # the response's body is not read
        ):
            response.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        reason = failure_reason(error)
        log.warning(
            "The webhook of the roll-out of %s did not accept '%s' (%s); the roll-out continues.",
            rollout.model,
            rollout.state,
            reason,
        )


async def apply_event(
    connection: AsyncConnection, rollout: Rollout, event: RolloutEvent, by: AuditContext, reason: str = ""
) -> Rollout:
    """Write the state after an event, with its weights and its audit entry. Return the new state.

    Raises:
        InputError: The event is impossible in this state.
        ResourceError: Another process has changed the roll-out meanwhile.
    """
    changed = transition(rollout, event, by.at, reason)
    await rollouts.save_rollout(connection, changed, by)
    return changed


@dataclass
class _Canary:
    """The judge and the conditions of one roll-out, and the outcomes that have been read.

    `since` is the time from which batches of outcomes are read. `seen` has the time of each batch
    since then that the judge has observed, by id.
    """

    judge: CanaryJudge
    analysis: Analysis
    since: datetime
    # revision of the roll-out at which the current step began
    revision: int
    seen: dict[str, datetime] = field(default_factory=dict)

    async def observe(self, batches: Sequence[OutcomeBatch], now: datetime) -> None:
        for batch in batches:
            # let other tasks run: a hundred thousand outcomes, as after a restart, take four seconds
            await asyncio.sleep(0)
            if batch.id not in self.seen:
                self.seen[batch.id] = batch.written_at
                for values in batch.outcomes:
                    known = {name: value for name, value in values.items() if name in _OUTCOME_FIELDS}
                    # a damaged outcome does not count
                    with suppress(*MALFORMED):
                        self.judge.observe(RequestOutcome(**known))
        if self.seen:
            # at most the current time, so that a gateway with a fast clock does not move `since`
            # past the batches of other gateways
            newest = min(max(self.seen.values()), now)
            self.since = max(self.since, newest - timedelta(seconds=LATE_BATCH))
            self.seen = {name: at for name, at in self.seen.items() if at >= self.since}


class RolloutRunner(LeaderJob):
    """The job that starts replicas, lets canaries be judged and changes the weights."""

    name = "Roll-outs"

    def __init__(
        self,
        store: str,
        replicas: VersionReplicas,
        tick: float = TICK,
        weights_delay: float = WEIGHTS_DELAY,
    ) -> None:
        """Create the job.

        Args:
            store: URL of the store.
            replicas: Starts and stops the replicas of versions.
            tick: Seconds between two looks at the roll-outs.
            weights_delay: Seconds between a change of weights and the stop of replicas.
        """
        self._url, self._replicas, self._tick, self._weights_delay = store, replicas, tick, weights_delay
        # tasks of the current states of roll-outs, by the roll-out's id and revision
        self._work: dict[tuple[str, int], asyncio.Task[tuple[RolloutEvent, str]]] = {}
        self._canaries: dict[str, _Canary] = {}
        self._log_once = LogOnce()

    async def run(self) -> None:
        """Carry out all roll-outs in the store until cancelled."""
        self._store = LazyStore(self._url, pool_size=2)
        try:
            await every(self._tick, self.look, immediately=True)
        finally:
            await cancel_tasks(*self._work.values())
            self._work.clear()
            await self._store.close()

    async def look(self) -> None:
        """Advance every open roll-out as far as possible now."""
        async with self._store.read() as connection:
            found = await rollouts.open_rollouts(connection)
        current = {(rollout.id, rollout.revision) for rollout in found}
        # a person has changed the state, so the task of the earlier state is obsolete
        stale = [key for key in self._work if key not in current]
        await cancel_tasks(*map(self._work.pop, stale))
        self._canaries = {rollout.id: self._canaries[rollout.id] for rollout in found if rollout.id in self._canaries}
        for rollout in found:
            try:
                await self._advance(rollout)
            except (ResourceError, InputError) as error:
                # another process changed the state first; the next look reads the new state
                log.info("%s", error.message)
            except Exception:
                # an error in one roll-out must not stop the roll-outs of other models
                if self._log_once.is_new(rollout.id, f"in revision {rollout.revision}"):
                    log.exception(
                        "The roll-out of %s cannot continue; roll it back with `llmops rollout rollback`.",
                        escape_unsafe(rollout.model),
                    )

    async def _advance(self, rollout: Rollout) -> None:
        match RolloutState(rollout.state):
            case RolloutState.STARTING:
                await self._do(rollout, lambda: self._start(rollout))
            case RolloutState.SHIFTING | RolloutState.WAITING | RolloutState.PAUSED:
                await self._judge(rollout)
            case RolloutState.KEEPING:
                kept = timedelta(seconds=RolloutSettings.of(rollout).keep_old)
                if utc_now() - rollout.changed_at >= kept:
                    reason = f"{rollout.stable} was kept for {kept.total_seconds():g} s"
                    await self._apply(rollout, RolloutEvent.KEPT, reason)
            case RolloutState.RETIRING:
                await self._do(rollout, lambda: self._stop(rollout, rollout.stable))
            case RolloutState.ROLLING_BACK:
                await self._do(rollout, lambda: self._stop(rollout, rollout.candidate))

    async def _do(self, rollout: Rollout, work: Callable[[], Coroutine[Any, Any, tuple[RolloutEvent, str]]]) -> None:
        """Start the task of a state, or apply the event that the task returned."""
        key = (rollout.id, rollout.revision)
        task = self._work.get(key)
        if task is None:
            self._work[key] = asyncio.create_task(work(), name=f"roll-out of {rollout.model}: {rollout.state}")
        elif task.done():
            del self._work[key]
            await self._apply(rollout, *task.result())

    async def _start(self, rollout: Rollout) -> tuple[RolloutEvent, str]:
        settings, began = RolloutSettings.of(rollout), time.monotonic()
        try:
            candidate, stable = await self._versions(rollout, rollout.candidate, rollout.stable)
            started = await self._replicas.start(candidate, stable, settings, rollout.twin)
            async with self._store.write() as connection:
                if started.twin is not None:
                    # the twin is created between the stable version and the candidate, so that
                    # lists show this order
                    await rollouts.put_version(connection, started.twin, rollout.started_at)
                await rollouts.set_replicas(connection, rollout.model, rollout.candidate, started.addresses)
                if started.stable:
                    await rollouts.set_replicas(connection, rollout.model, rollout.stable, started.stable)
        except LlmopsError as error:
            return RolloutEvent.FAILED, f"{rollout.candidate} could not be started: {error.message}"
        except Exception as error:
            log.exception(
                "The replicas of %s %s could not be started; the roll-out is rolled back.",
                rollout.model,
                rollout.candidate,
            )
            return RolloutEvent.FAILED, f"{rollout.candidate} could not be started ({error!r}); control's log says why"
        reason = f"{rollout.candidate} is ready after {time.monotonic() - began:.0f} s"
        if started.differences is None:
            reason += (
                f"; its tokenizer, chat template and context could not be compared, because no replica of "
                f"{rollout.stable} answered: give control the gateways' setting `replicas`"
            )
        elif started.differences:
            reason += f"; it has {started.differences}, and answers its requests with them"
        if started.twin_problem:
            reason += f"; there is no twin: {started.twin_problem}"
        # wait until every gateway knows the replicas before they get requests
        await asyncio.sleep(self._weights_delay)
        return RolloutEvent.READY, reason

    async def _stop(self, rollout: Rollout, name: str) -> tuple[RolloutEvent, str]:
        await asyncio.sleep(self._weights_delay)
        async with self._store.read() as connection:
            twin = (rollout.twin,) if await rollouts.has_twin(connection, rollout) else ()
        try:
            if name == rollout.candidate:
                await self._restore(rollout)
            for version in await self._versions(rollout, name, *twin):
                await self._replicas.stop(version, RolloutSettings.of(rollout).drain_timeout)
        except LlmopsError as error:
            log.warning(
                "The replicas of %s %s could not be stopped and still run; stop them. %s",
                rollout.model,
                name,
                error.message,
            )
            return RolloutEvent.STOPPED, f"{rollout.reason}; the replicas of {name} are still there: {error.message}"
        return RolloutEvent.STOPPED, rollout.reason

    async def _restore(self, rollout: Rollout) -> None:
        """Start the old replicas that were stopped to make room.

        Until the old replicas run, both versions share the remaining replicas.
        """
        stable, candidate = await self._versions(rollout, rollout.stable, rollout.candidate)
        addresses = await self._replicas.restore(stable, candidate)
        if addresses:
            async with self._store.write() as connection:
                await rollouts.set_replicas(connection, rollout.model, rollout.stable, addresses)
            await asyncio.sleep(self._weights_delay)

    async def _versions(self, rollout: Rollout, *names: str) -> Sequence[ModelVersion]:
        async with self._store.read() as connection:
            versions = {one.name: one for one in await rollouts.list_versions(connection, rollout.model)}
        for name in names:
            if name not in versions:
                raise InputError(
                    f"The store has no version {name} of {rollout.model} any longer; restore its row from a backup."
                )
        return [versions[name] for name in names]

    async def _judge(self, rollout: Rollout) -> None:
        settings = RolloutSettings.of(rollout)
        canary = self._canaries.get(rollout.id)
        if canary is None:
            canary = self._canaries[rollout.id] = await self._resume_judge(rollout)
        elif canary.revision != rollout.revision:
            canary.revision = rollout.revision
            canary.judge.begin_step()
        async with self._store.read() as connection:
            found = await rollouts.read_outcomes(connection, rollout.model, canary.since)
            # a hundred processes write more batches within LATE_BATCH than one query reads
            while len(found) == rollouts.OUTCOME_BATCHES and canary.seen.keys() >= {batch.id for batch in found}:
                if found[-1].written_at == found[0].written_at:
                    break
                found = await rollouts.read_outcomes(connection, rollout.model, found[-1].written_at)
        await canary.observe(found, utc_now())
        verdict = _combine(canary.judge.verdict(), await canary.analysis.check())
        data = asdict(verdict)
        if data != rollout.verdict:
            async with self._store.write() as connection:
                await rollouts.save_verdict(connection, rollout, data)
        event = _EVENTS.get(verdict.decision)
        if event is not None and (settings.auto or settings.approve) and rollout.state == RolloutState.SHIFTING:
            await self._apply(rollout, event, verdict.reason)

    async def _resume_judge(self, rollout: Rollout) -> _Canary:
        """Return a judge that has observed the outcomes before the current step.

        A restarted process thereby continues the work of the process before.
        """
        since = max(rollout.started_at, rollout.changed_at - RESUMED_TIME)
        settings = RolloutSettings.of(rollout)
        analysis = Analysis(settings.prometheus, settings.analysis, time.monotonic)
        async with self._store.read() as connection:
            twin = rollout.twin if await rollouts.has_twin(connection, rollout) else None
            judge_settings = JudgeSettings(
                stable=rollout.stable,
                canary=rollout.candidate,
                twin=twin,
                min_requests=settings.min_requests,
                min_seconds=settings.min_seconds,
                quality_tolerance=settings.quality_tolerance,
            )
            canary = _Canary(CanaryJudge(judge_settings, time.monotonic), analysis, since, rollout.revision)
            before = await rollouts.read_outcomes(connection, rollout.model, since, rollout.changed_at)
        await canary.observe(before, utc_now())
        canary.judge.begin_step()
        return canary

    async def _apply(self, rollout: Rollout, event: RolloutEvent, reason: str) -> None:
        by = AuditContext(ACTOR, utc_now())
        async with self._store.write() as connection:
            changed = await apply_event(connection, rollout, event, by, reason)
        log.warning(
            "roll-out of %s: %s, %g %% on %s (%s)",
            *(changed.model, changed.state, changed.percent, changed.candidate, changed.reason),
        )
        await notify_webhook(changed, ACTOR)


def _combine(verdict: Verdict, analysis: AnalysisResult) -> Verdict:
    """Return the judge's verdict, combined with the roll-out's own conditions in Prometheus."""
    if verdict.decision == "rollback" or analysis.state == "passed":
        return verdict
    if analysis.state == "failed":
        return replace(verdict, decision="rollback", reason=analysis.reason)
    reason = analysis.reason if verdict.decision == "promote" else f"{analysis.reason} {verdict.reason}"
    return replace(verdict, decision="continue", reason=reason)
