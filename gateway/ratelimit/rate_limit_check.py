"""The check that applies rate limits to every request."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Scope

from llmops.distribution import missing_extra
from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Caller, Outcome, Quota
from llmops.gateway.ratelimit.backend import Limiter
from llmops.gateway.ratelimit.budgets import CostSource
from llmops.gateway.ratelimit.limits import RateLimits
from llmops.gateway.ratelimit.memory import InMemoryLimiter
from llmops.gateway.ratelimit.quotas import CallerLimits
from llmops.gateway.settings import GatewaySettings, Quotas, QuotaSettings

#: Maximum number of callers whose limits are cached. Beyond it, all are dropped and computed again.
_MAX_CALLERS = 10_000


class RateLimitCheck(Check):
    """A check that reserves a request and a slot before the body is read.

    All reservations are settled when the request has ended.
    """

    def __init__(self, rate_limits: RateLimits, quotas: Quotas) -> None:
        self.rate_limits, self._quotas = rate_limits, quotas
        self._for_all = tuple(_quotas("all callers", quotas.all))
        # Cached limits, by the name of an anonymous caller or by the `id` of another caller's
        # quotas. The quotas are kept here, so that no other object gets the same `id`.
        self._caller_limits: dict[str | int, tuple[Sequence[Quota], CallerLimits | None]] = {}

    async def before(self, scope: Scope, context: RequestContext) -> None:
        # Requests that only read use nothing that is scarce, and a cancellation frees something.
        if scope["method"] != "POST" or context.route.endswith("/cancel"):
            return
        limits = self._limits_of(context.caller)
        if limits is not None:
            context.reservation = reservation = self.rate_limits.new_reservation(limits, context.arrived)
            await reservation.enter()

    def adopt(self, context: RequestContext) -> None:
        # The gateway where the request began has counted the request; this gateway settles only the
        # usage.
        limits = self._limits_of(context.caller)
        if limits is not None:
            context.reservation = self.rate_limits.new_reservation(limits, context.arrived)

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        if context.reservation is not None:
            context.reservation.close(outcome)

    def of(self, caller: Caller) -> Sequence[Quota]:
        """Return the quotas of a caller, ending with the quotas of all callers together.

        A caller without quotas gets the quotas that the settings give to each caller.
        """
        return (*(caller.quotas or self._each(caller)), *self._for_all)

    def _limits_of(self, caller: Caller) -> CallerLimits | None:
        key = id(caller.quotas) if caller.quotas else caller_name(caller)
        known = self._caller_limits.get(key)
        if known is None:
            if len(self._caller_limits) >= _MAX_CALLERS:
                self._caller_limits.clear()
            quotas = self.of(caller)
            limits = CallerLimits(quotas, caller_name(caller)) if quotas else None
            known = self._caller_limits[key] = caller.quotas, limits
        return known[1]

    def _each(self, caller: Caller) -> Sequence[Quota]:
        name = caller_name(caller)
        by_model = [quota for model, each in self._quotas.models.items() for quota in _quotas(name, each, model)]
        return (*_quotas(name, self._quotas.each), *by_model)


def create_limit_check(settings: GatewaySettings, costs: CostSource | None = None) -> RateLimitCheck | None:
    """Return the check, or None if neither the settings nor the store can define limits.

    Raises:
        MissingDependencyError: Redis is configured and its client is not installed.
    """
    if not settings.quotas.model_fields_set and settings.redis is None and settings.store is None and costs is None:
        return None
    return RateLimitCheck(RateLimits(_limiter(settings), costs), settings.quotas)


def _limiter(settings: GatewaySettings) -> Limiter:
    if settings.redis is None:
        return InMemoryLimiter()
    try:
        from llmops.gateway.ratelimit.redis import RedisLimiter
    except ImportError as error:
        raise missing_extra("The setting `redis` needs Redis's client, which is not installed", "redis") from error
    return RedisLimiter(settings.redis, least_parts=settings.quotas.gateways * settings.workers)


def caller_name(caller: Caller) -> str:
    """Return the name under which a caller's requests count: its user, its key, or its address.

    An anonymous client is counted by its address, because the client can send any key.
    """
    if caller.tenant_id and not caller.key_id:
        return f"user {caller.user_id}"
    return caller.key_id or f"client {caller.share.partition('/')[0]}"


def _quotas(of: str, one: QuotaSettings, model: str | None = None) -> list[Quota]:
    return [Quota(of, one.rpm, one.tpm, one.concurrent, model=model)] if one.model_fields_set else []
