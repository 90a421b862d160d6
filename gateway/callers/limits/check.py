"""Limits at the door: who is bounded by what, and the end of every request that was."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Scope

from llmops.distribution import missing_extra
from llmops.gateway.callers.limits.base import Limiter
from llmops.gateway.callers.limits.budgets import Costs
from llmops.gateway.callers.limits.gate import Gate
from llmops.gateway.callers.limits.memory import InMemoryLimiter
from llmops.gateway.callers.limits.plan import Plan
from llmops.gateway.http.context import RequestContext
from llmops.gateway.http.door import Check
from llmops.gateway.messages import Caller, Outcome, Quota
from llmops.gateway.settings import GatewaySettings, Quotas, QuotaSettings

# plans that are remembered
_MOST = 10_000


class LimitCheck(Check):
    """Requests and places before anything is read; what else was reserved is settled when the request is over."""

    def __init__(self, gate: Gate, quotas: Quotas) -> None:
        self.gate, self._quotas = gate, quotas
        self._everybody = tuple(_quotas("all callers", quotas.all))
        # by an anonymous caller's name, or by which object another's quotas are (kept, so that its id stays its own)
        self._plans: dict[str | int, tuple[Sequence[Quota], Plan | None]] = {}

    async def before(self, scope: Scope, context: RequestContext) -> None:
        # what only asks for what is there costs nothing that is scarce, and a cancel gives some of it back
        if scope["method"] != "POST" or context.route.endswith("/cancel"):
            return
        plan = self._plan(context.caller)
        if plan is not None:
            context.grant = ticket = self.gate.ticket(plan, scope)
            await ticket.enter()

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        if context.grant is not None:
            context.grant.close(outcome)

    def of(self, caller: Caller) -> Sequence[Quota]:
        """A caller's own quotas, or for one without any those of each; and those of all together, always last."""
        return (*(caller.quotas or self._each(caller)), *self._everybody)

    def _plan(self, caller: Caller) -> Plan | None:
        key = id(caller.quotas) if caller.quotas else name_of(caller)
        known = self._plans.get(key)
        if known is None:
            if len(self._plans) >= _MOST:
                self._plans.clear()
            quotas = self.of(caller)
            known = self._plans[key] = caller.quotas, Plan(quotas) if quotas else None
        return known[1]

    def _each(self, caller: Caller) -> Sequence[Quota]:
        name = name_of(caller)
        by_model = [quota for model, one in self._quotas.models.items() for quota in _quotas(name, one, model)]
        return (*_quotas(name, self._quotas.each), *by_model)


def limits_of(settings: GatewaySettings, costs: Costs | None = None) -> LimitCheck | None:
    """The check that the settings, or the keys of their store, may need; None without both.

    Raises MissingDependencyError when Redis is asked for and its client is not installed.
    """
    if not settings.quotas.model_fields_set and settings.redis is None and settings.store is None and costs is None:
        return None
    return LimitCheck(Gate(_limiter(settings), costs), settings.quotas)


def _limiter(settings: GatewaySettings) -> Limiter:
    if settings.redis is None:
        return InMemoryLimiter()
    try:
        from llmops.gateway.callers.limits.redis import RedisLimiter
    except ImportError as error:
        raise missing_extra("The setting `redis` needs Redis's client, which is not installed", "redis") from error
    return RedisLimiter(settings.redis)


def name_of(caller: Caller) -> str:
    """Return the name under which a caller's requests count: of its user, its key, or its address.

    An anonymous client is its address: what it sends as a key is its own to choose.
    """
    if caller.tenant_id and not caller.key_id:
        return f"user {caller.user_id}"
    return caller.key_id or f"client {caller.share.partition('/')[0]}"


def _quotas(of: str, one: QuotaSettings, model: str | None = None) -> list[Quota]:
    return [Quota(of, one.rpm, one.tpm, one.concurrent, model=model)] if one.model_fields_set else []
