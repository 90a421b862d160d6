"""Policies, which determine the filters that apply to a tenant's requests.

A policy also determines the consequence of a finding, and how findings are recorded.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Protocol
from weakref import WeakValueDictionary

from llmops.errors import InputError
from llmops.gateway.errors import ContentPolicyError, SafetyUnavailableError
from llmops.gateway.interfaces import Caller
from llmops.gateway.logging_setup import RepeatedLines
from llmops.gateway.ratelimit.slots import FairSlots
from llmops.gateway.safety.filters import JUDGED_TENANT, FilterUnavailableError, Finding, StreamMode, TextFilter
from llmops.gateway.safety.rules import RuleFilter, rule_filter, script_filter
from llmops.gateway.safety.services import (
    ClassifierFilter,
    Embed,
    Generate,
    GuardFilter,
    ModerationFilter,
    read_head,
)
from llmops.gateway.safety.stream_guard import RuleStage, StreamGuard, WindowStage
from llmops.gateway.settings import FilterSettings, SafetyPolicy, SafetySettings
from llmops.gateway.telemetry import metric_definitions
from llmops.gateway.telemetry.metrics import GatewayMetrics
from llmops.input_files import read_lines

log = logging.getLogger(__name__)

#: Maximum number of texts of `/v1/moderations` that are judged at once for a caller.
MAX_MODERATIONS = 16
#: Maximum number of texts that a filter judges at once, below the 100 connections that the HTTP
#: client of a filter's service has. For a classifier, whose texts have any number of passages and
#: no time limit, it is the number of passages.
MAX_JUDGED = 64
#: Seconds between two log lines about findings of one filter for one tenant, and about a filter's
#: failures. Bounds the log, because a caller can cause a line with every request.
LOG_INTERVAL = 1.0


class FindingAudit(Protocol):
    """An interface to the audit log of findings, which never receives the judged text."""

    def note_finding(self, caller: Caller, filter_name: str, **details: str) -> None: ...


class _FairFilter(TextFilter):
    """A filter for one caller that asks a model or service. Callers take turns at the service."""

    def __init__(self, judge: TextFilter, slots: FairSlots, caller: Caller) -> None:
        self.name, self.categories = judge.name, judge.categories
        self._judge, self._slots, self._caller = judge, slots, caller

    async def judge(self, text: str) -> Finding | None:
        async with self._slots.slot(self._caller.share):
            JUDGED_TENANT.set(self._caller.group)
            return await self._judge.judge(text)


class Safety:
    """The filters of a gateway and the policies of its tenants."""

    def __init__(
        self,
        settings: SafetySettings,
        filters: Mapping[str, TextFilter],
        metrics: GatewayMetrics,
        audit: FindingAudit | None = None,
    ) -> None:
        self._audit, self._lines = audit, RepeatedLines(LOG_INTERVAL)
        self._settings, self.filters = settings, dict(filters)
        self._moderating: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._judging = {
            name: FairSlots(sys.maxsize if isinstance(one, ClassifierFilter) else MAX_JUDGED)
            for name, one in filters.items()
        }
        self._findings = metrics.numbers(metric_definitions.SAFETY_FINDINGS)
        self._failures = metrics.numbers(metric_definitions.SAFETY_FAILURES)
        self._seconds = metrics.histogram(metric_definitions.SAFETY_SECONDS)

    async def check_prompt(self, texts: Sequence[str], caller: Caller, rendered: str = "", end_user: str = "") -> None:
        """Judge the texts of a request.

        Rules also read the `rendered` prompt, which includes the text that a template makes of
        other fields. Models and services do not, because the words of the template would change
        their scores.

        Raises:
            ContentPolicyError: A filter found something.
            SafetyUnavailableError: A filter could not judge, and the policy fails closed.
        """
        policy = self._policy(caller)
        text = "\n".join(texts)
        if not policy.prompt:
            return
        JUDGED_TENANT.set(caller.group)
        finding = await self._first(text, rendered, [self._fair(name, caller) for name in policy.prompt], policy)
        if finding is not None:
            self._record(finding, "prompt", "refused", caller, end_user, text)
            raise ContentPolicyError(finding.category)

    def guard(self, caller: Caller, before: str = "", end_user: str = "") -> StreamGuard | None:
        """Return the guard of one choice of an answer that continues the text `before`.

        Return None for callers whose policy does not filter answers.
        """
        policy = self._policy(caller)
        if not policy.answer:
            return None
        stages = [self._stage(self._fair(name, caller), mode, policy, before) for name, mode in policy.answer.items()]
        return StreamGuard(stages, lambda found, mode: self._record(found, "answer", mode, caller, end_user))

    async def moderate(self, text: str, caller: Caller) -> list[Finding]:
        """Return the findings of each filter in a text, for `/v1/moderations`. Callers take turns.

        Raises:
            SafetyUnavailableError: A filter could not judge the text.
        """
        JUDGED_TENANT.set(caller.group)
        async with self._moderating.setdefault(caller.share, asyncio.Semaphore(MAX_MODERATIONS)):
            verdicts = await asyncio.gather(
                *(self._judge(self._fair(name, caller), text) for name in self.filters), return_exceptions=True
            )
        for one in verdicts:
            if isinstance(one, FilterUnavailableError):
                raise SafetyUnavailableError from one
            if isinstance(one, BaseException):
                raise one
        return [one for one in verdicts if isinstance(one, Finding)]

    async def close(self) -> None:
        await asyncio.gather(*(one.close() for one in self.filters.values()))

    def _policy(self, caller: Caller) -> SafetyPolicy:
        return self._settings.tenants.get(caller.tenant_id, self._settings.policy)

    def _fair(self, name: str, caller: Caller) -> TextFilter:
        one = self.filters[name]
        return one if isinstance(one, RuleFilter) else _FairFilter(one, self._judging[name], caller)

    def _stage(self, one: TextFilter, mode: StreamMode, policy: SafetyPolicy, before: str) -> RuleStage | WindowStage:
        if isinstance(one, RuleFilter):
            return RuleStage(one, mode, before)
        return WindowStage(one, mode, self._settings.window, fail_open=policy.fail == "open", before=before)

    async def _first(
        self, text: str, rendered: str, filters: Iterable[TextFilter], policy: SafetyPolicy
    ) -> Finding | None:
        for one in filters:
            read = f"{text}\n{rendered}" if isinstance(one, RuleFilter) else text
            if not read.strip():
                continue
            try:
                finding = await self._judge(one, read)
            except FilterUnavailableError:
                if policy.fail == "closed":
                    raise SafetyUnavailableError from None
                continue
            if finding is not None:
                return finding
        return None

    async def _judge(self, one: TextFilter, text: str) -> Finding | None:
        started = time.perf_counter()
        try:
            return await one.judge(text)
        except FilterUnavailableError as error:
            self._failures.labels(one.name).inc()
            if (suffix := self._lines.suffix((one.name, "failed"))) is not None:
                log.warning(
                    "The safety filter %s could not judge a text (%s); the policy's setting `fail` decides whether "
                    "such texts pass%s",
                    one.name,
                    error,
                    suffix,
                )
            raise
        finally:
            self._seconds.labels(one.name).observe(time.perf_counter() - started)

    def _record(self, finding: Finding, side: str, action: str, caller: Caller, end_user: str, text: str = "") -> None:
        if self._audit is not None:
            self._audit.note_finding(
                caller, finding.filter, category=finding.category, side=side, action=action, end_user=end_user
            )
        self._findings.labels(finding.filter, side, action).inc()
        suffix = self._lines.suffix((finding.filter, side, caller.tenant_id))
        if suffix is None:
            return
        digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16] if text else "-"
        log.warning(
            "Safety: filter %s found %s in the %s (%s, tenant %s, sha256 %s)%s",
            finding.filter, finding.category, side, action, caller.tenant_id or "-", digest, suffix,
        )  # fmt: skip


def create_safety(
    settings: SafetySettings,
    metrics: GatewayMetrics,
    embed: Embed,
    generate: Generate,
    audit: FindingAudit | None = None,
) -> Safety | None:
    """Return the filters that the settings describe, or None if the settings have no filters.

    Args:
        settings: The filters and policies.
        metrics: The gateway's metrics, which count findings.
        embed: Turns texts into vectors, for classifiers.
        generate: Returns the answer of a guard model.
        audit: The audit log of findings, if there is one.

    Raises:
        InputError: A filter cannot be created.
    """
    if not settings.filters:
        return None
    filters = {name: create_filter(name, one, embed, generate) for name, one in settings.filters.items()}
    return Safety(settings, filters, metrics, audit)


async def _ask_nothing(*_: object) -> NoReturn:
    raise FilterUnavailableError("no model")


def check_filters(settings: SafetySettings) -> None:
    """Create and discard all filters, so that a faulty filter is found before the gateway listens.

    Raises:
        InputError: A filter cannot be created.
    """

    async def create_and_close() -> None:
        for name, one in settings.filters.items():
            await create_filter(name, one, _ask_nothing, _ask_nothing).close()

    if settings.filters:
        asyncio.run(create_and_close())


def create_filter(name: str, settings: FilterSettings, embed: Embed, generate: Generate) -> TextFilter:
    """Return one filter.

    Raises:
        InputError: A pattern, a file or a key cannot be used.
    """
    category = settings.category or name
    match settings.kind:
        case "rules":
            words = [*settings.words, *_lines(settings.words_file)]
            return rule_filter(name, category, settings.patterns, words, settings.ignore_case)
        case "language":
            return script_filter(name, category, settings.scripts)
        case "model" if settings.guard is not None:
            return GuardFilter(name, category, settings.guard, generate)
        case "model":
            assert settings.head is not None
            return ClassifierFilter(name, read_head(settings.head), embed)
        case "http":
            return ModerationFilter(
                name, settings.url, model=settings.model, key_env=settings.key_env, timeout=settings.timeout
            )


def _lines(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        return read_lines(path)
    except OSError as error:
        raise InputError(
            f"The word list {path} cannot be read ({error.strerror or error}); correct `words_file`."
        ) from None
    except UnicodeDecodeError:
        raise InputError(f"The word list {path} is not text in UTF-8; save it as UTF-8.") from None
