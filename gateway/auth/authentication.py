"""The check of the door: nobody passes without a key, once there are keys."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from starlette.types import Scope

from llmops.distribution import missing_extra
from llmops.gateway.auth.audit import RejectionAudit
from llmops.gateway.auth.combined import CombinedDirectory
from llmops.gateway.auth.credential_cache import CachedDirectory
from llmops.gateway.auth.directory import Directory, MemberDirectory
from llmops.gateway.auth.revocation import REVOCATION_INTERVAL, RevocationWatch
from llmops.gateway.errors import ForbiddenError, InvalidKeyError, MissingKeyError, UnavailableError
from llmops.gateway.http import api_docs
from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Caller, Outcome
from llmops.gateway.settings import GatewaySettings, OidcSettings

if TYPE_CHECKING:
    from llmops.gateway.auth.keys import KeyDirectory

# may ask whether the gateway lives, and nothing of what it serves
ANONYMOUS_CALLER = Caller(scopes=frozenset())
HEALTH_PREFIX = "/health"
# the chat page and its files, which are the same for all; what it shows comes from routes that ask for a key
CHAT_PAGE_ROUTES = frozenset({"/", "/assets/{name:path}"})
# by the beginning of a route's path: the scopes of which one is enough; all others are for `inference`
ROUTE_SCOPES = (
    ("/metrics", ("metrics",)),
    ("/replicas", ("metrics", "inference")),
    ("/api/admin", ("admin",)),
    ("/v1/organization", ("usage",)),
    # its own; what its tenant used is for `usage`
    ("/api/usage", ("usage", "inference")),
)


class Authentication(Check):
    """Refuses by default: every route asks for a key, also one added later, but for /health/* without a query, the API
    reference, and the files of the chat page."""

    def __init__(
        self, directory: Directory, refusals: RejectionAudit | None = None, interval: float = REVOCATION_INTERVAL
    ) -> None:
        """`interval`: seconds between two looks for keys whose running answers must end."""
        self._directory, self._refusals = directory, refusals
        self._running = RevocationWatch(directory, interval)

    async def before(self, scope: Scope, context: RequestContext) -> None:
        """Puts the caller on the context.

        Raises InvalidKeyError, ForbiddenError for a key without the route's scope, UnavailableError where nobody can
        say whose a key is.
        """
        if context.route in api_docs.DOCS_ROUTES or context.route in CHAT_PAGE_ROUTES:
            context.caller = ANONYMOUS_CALLER
            return
        credential = _credential_in(scope)
        known = self._directory.known(credential) if credential is not None else None
        if known is None:
            probe = credential is None and context.route.startswith(HEALTH_PREFIX) and not scope["query_string"]
            if not await self._asked(probe):
                return
            if probe:
                context.caller = ANONYMOUS_CALLER
                return
            known = await self._caller(credential)
        context.caller = known
        wanted = required_scopes(context.route)
        if wanted and context.caller.scopes.isdisjoint(wanted):
            path = context.route.partition("/{")[0]
            raise ForbiddenError(
                f"This API key does not have the scope '{wanted[0]}', which {path} asks for; use a key that has it."
            )
        if known.key_id and scope.get("method") == "POST":
            self._running.enter(context, scope)

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        self._running.leave(context)
        if self._refusals is not None:
            self._refusals.note(context, outcome)

    async def close(self) -> None:
        await self._running.close()
        if self._refusals is not None:
            await self._refusals.close()
        await self._directory.close()

    async def _asked(self, probe: bool) -> bool:
        """Whether keys are asked for; whether the gateway lives must not hang on its store."""
        try:
            return await self._directory.has_credentials()
        except UnavailableError:
            if probe:
                return True
            raise

    async def _caller(self, credential: str | None) -> Caller:
        if credential is None:
            raise MissingKeyError
        if not self._directory.takes(credential):
            raise InvalidKeyError(self._directory.foreign)
        caller = await self._directory.find(credential)
        if caller is None:
            raise InvalidKeyError("This API key is not known here; it is mistyped, or of another deployment.")
        return caller


@lru_cache(maxsize=256)
def required_scopes(route: str) -> tuple[str, ...]:
    """One of which a key must have to ask there; empty where any key will do."""
    if route.startswith(HEALTH_PREFIX):
        return ()
    return next((scopes for begins, scopes in ROUTE_SCOPES if route.startswith(begins)), ("inference",))


def create_authentication(settings: GatewaySettings) -> Authentication | None:
    """None where nobody is asked for a key. Raises MissingDependencyError where libraries are not there."""
    if settings.open or (settings.store is None and settings.oidc is None):
        return None
    keys = None if settings.store is None else _keys(settings.store)
    directories: list[Directory] = [] if keys is None else [keys]
    if settings.oidc is not None:
        directories.append(_tokens(settings.oidc, keys))
    lookups = settings.lookups
    cached = [CachedDirectory(one, lookups.fresh, lookups.stale) for one in directories]
    refusals = None if settings.store is None else _refusals(settings.store)
    directory = cached[0] if len(cached) == 1 else CombinedDirectory(cached)
    return Authentication(directory, refusals, min(lookups.fresh / 3, REVOCATION_INTERVAL))


def _keys(url: str) -> KeyDirectory:
    try:
        from llmops.gateway.auth.keys import KeyDirectory
    except ModuleNotFoundError as error:
        raise missing_extra(f"A store needs {error.name}, which is not installed", "store") from error
    return KeyDirectory(url)


def _refusals(url: str) -> RejectionAudit:
    from llmops.gateway.auth.keys import SqlAuditLog

    return RejectionAudit(SqlAuditLog(url))


def _tokens(settings: OidcSettings, members: MemberDirectory | None) -> Directory:
    try:
        from llmops.gateway.auth.oidc import Tokens
    except ModuleNotFoundError as error:
        raise missing_extra(f"The setting `oidc` needs {error.name}, which is not installed", "oidc") from error
    return Tokens(settings, members)


def _credential_in(scope: Scope) -> str | None:
    """What may be a key: a Bearer token, as OpenAI's clients send it, or else `x-api-key`, as Anthropic's do.

    Another kind of authorization is what it is, so that it is told to be no key.
    """
    other, key = "", ""
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, token = value.decode("latin-1").partition(" ")
            if kind.lower() == "bearer" and token.strip():
                return str(token.strip())
            other = other or kind
        elif name == b"x-api-key" and not key:
            key = value.decode("latin-1").strip()
    return key or other or None
