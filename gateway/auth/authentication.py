"""The check that authenticates requests: once keys exist, every request needs a key.

The module also has the check that runs before the port is opened: a gateway without keys must not
listen on a public host.
"""

from __future__ import annotations

import asyncio
import base64
from types import ModuleType
from typing import TYPE_CHECKING

from starlette.types import Scope

from llmops.background import cancel_tasks
from llmops.distribution import missing_extra
from llmops.errors import InputError
from llmops.gateway.auth.audit import CountingAudit
from llmops.gateway.auth.credential_cache import CachedDirectory
from llmops.gateway.auth.directory import CombinedDirectory, Directory
from llmops.gateway.errors import ForbiddenError, InvalidKeyError, MissingKeyError, UnavailableError
from llmops.gateway.http import api_docs
from llmops.gateway.http.chunked_writer import SERVER_SEND_KEY
from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Caller, Outcome
from llmops.gateway.logging_setup import request_logger
from llmops.gateway.settings import GatewaySettings, OidcSettings
from llmops.urls import is_loopback

if TYPE_CHECKING:
    from llmops.gateway.auth.keys import KeyDirectory

log = request_logger(__name__)

#: Seconds between two polls for revoked keys with running answers. Three polls fit into the 30 s
#: after which a revoked key is refused.
REVOCATION_INTERVAL = 10.0


class RevocationWatch:
    """A watch over requests in progress, which ends the answers of revoked keys.

    Replaced secrets and deleted tenants are treated like revoked keys. Nothing is looked up while
    no request with a key or a token is in progress.
    """

    def __init__(self, directory: Directory, interval: float) -> None:
        self._directory, self._interval = directory, interval
        self._requests: dict[int, tuple[RequestContext, Scope]] = {}
        self._watch: asyncio.Task[None] | None = None

    def enter(self, context: RequestContext, scope: Scope) -> None:
        self._requests[id(context)] = context, scope
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._watched(), name="end-answers")

    def leave(self, context: RequestContext) -> None:
        self._requests.pop(id(context), None)

    async def close(self) -> None:
        await cancel_tasks(self._watch)

    async def _watched(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            callers = {context.caller for context, _ in self._requests.values()}
            if not callers:
                self._watch = None
                return
            try:
                ended = await self._directory.ended(callers)
            except UnavailableError:
                # The directory has logged that it is unavailable.
                continue
            for context, scope in list(self._requests.values()):
                if context.caller in ended:
                    _abort_request(context, scope)


def _abort_request(context: RequestContext, scope: Scope) -> None:
    """End the request as if its client had left."""
    log.info(
        "The answer of request %s ends, because its key was revoked with --now or rotated, or its tenant was deleted.",
        context.request_id,
    )
    if context.background_task is not None:
        context.background_task.cancel()
    transport = getattr(getattr(scope.get(SERVER_SEND_KEY), "__self__", None), "transport", None)
    if transport is not None:
        transport.abort()


#: The caller of routes that need no key. Without scopes, the caller sees that the gateway is alive,
#: and nothing else.
ANONYMOUS_CALLER = Caller(scopes=frozenset())
HEALTH_PREFIX = "/health"
#: Routes that need no key: the pages and their files are the same for every visitor, and their
#: content comes from routes that need a key.
PAGE_ROUTES = frozenset({"/", "/admin", "/assets/{name:path}"})
#: Scopes that give access, by the prefix of a route's path: a key needs one of them. All other
#: routes need `inference`.
ROUTE_SCOPES = (
    ("/metrics", ("metrics",)),
    ("/replicas", ("metrics", "inference")),
    ("/api/admin", ("admin",)),
    ("/api/rollouts", ("metrics", "admin")),
    ("/v1/organization", ("usage",)),
    # A key with `inference` sees its own usage; a key with `usage` sees the usage of its tenant.
    ("/api/usage", ("usage", "inference")),
    # Any key may sign in.
    ("/api/session", ()),
)


class Authentication(Check):
    """A check that rejects requests without a valid key.

    Every route needs a key, including routes that are added later. Exceptions: /health/* without a
    query, the API reference, and the files of the chat page.
    """

    def __init__(
        self, directory: Directory, rejections: CountingAudit | None = None, interval: float = REVOCATION_INTERVAL
    ) -> None:
        """Create the check.

        Args:
            directory: The directory that looks up callers by their credentials.
            rejections: The counter of rejected requests for the audit log; None to count nothing.
            interval: Seconds between two polls for revoked keys with running answers.
        """
        self._directory, self._rejections = directory, rejections
        self._running = RevocationWatch(directory, interval)

    async def before(self, scope: Scope, context: RequestContext) -> None:
        """Set the caller of the request.

        Raises:
            InvalidKeyError: The key is missing, unknown, expired or revoked.
            ForbiddenError: The key lacks the scope of the route.
            UnavailableError: The key store cannot be reached.
        """
        credential = _credential_in(scope)
        # a health check must not depend on the store
        probe = credential is None and context.route.startswith(HEALTH_PREFIX) and not scope["query_string"]
        if probe or context.route in api_docs.DOCS_ROUTES or context.route in PAGE_ROUTES:
            context.caller, context.unauthenticated = ANONYMOUS_CALLER, True
            return
        caller = self._directory.known(credential) if credential is not None else None
        if caller is None:
            if not await self._directory.has_credentials():
                return
            context.unauthenticated = True
            caller = await self._find(credential)
            context.unauthenticated = False
        context.caller = caller
        scopes = required_scopes(context.route)
        if scopes and caller.scopes.isdisjoint(scopes):
            path = context.route.partition("/{")[0]
            raise ForbiddenError(
                f"This API key does not have the scope '{scopes[0]}', which {path} asks for; use a key that has this "
                "scope."
            )
        if caller.tenant_id:
            self._running.enter(context, scope)

    def adopt(self, context: RequestContext) -> None:
        # The key may be revoked during this request, too.
        if context.caller.tenant_id:
            self._running.enter(context, {})

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        self._running.leave(context)
        if self._rejections is not None:
            self._rejections.note(context, outcome)

    async def close(self) -> None:
        """Write the counts of rejected requests, and close all connections."""
        await self._running.close()
        if self._rejections is not None:
            await self._rejections.close()
        await self._directory.close()

    async def _find(self, credential: str | None) -> Caller:
        if credential is None:
            raise MissingKeyError
        if not self._directory.takes(credential):
            raise InvalidKeyError(self._directory.foreign)
        caller = await self._directory.find(credential)
        if caller is None:
            raise InvalidKeyError(
                "This API key is not known here; check it for typing errors, and use a key of this deployment."
            )
        return caller


def required_scopes(route: str) -> tuple[str, ...]:
    """Return the scopes that give access to this route; empty if every key has access."""
    if route.startswith(HEALTH_PREFIX):
        return ()
    return next((scopes for prefix, scopes in ROUTE_SCOPES if route.startswith(prefix)), ("inference",))


def create_authentication(settings: GatewaySettings) -> Authentication | None:
    """Return the check, or None if keys are never required.

    Raises:
        MissingDependencyError: A library is not installed.
    """
    if settings.open or (settings.store is None and settings.oidc is None):
        return None
    keys = None if settings.store is None else _key_module().KeyDirectory(settings.store)
    directories: list[Directory] = [] if keys is None else [keys]
    if settings.oidc is not None:
        directories.append(_oidc_directory(settings.oidc, keys))
    lookups = settings.lookups
    cached = [CachedDirectory(directory, lookups.fresh, lookups.stale) for directory in directories]
    rejections = None if settings.store is None else create_audit(settings.store)
    directory = cached[0] if len(cached) == 1 else CombinedDirectory(cached)
    return Authentication(directory, rejections, min(lookups.fresh / 3, REVOCATION_INTERVAL))


def keys_required(settings: GatewaySettings) -> bool:
    """Return True if keys are required from the start. Creates or migrates the store.

    Raises:
        InputError: The host is public, and no key is required.
        LlmopsError: The store cannot be opened.
    """
    authentication = create_authentication(settings)
    # Open the store now, so that a fault in the store is reported at the start and not by the first
    # request.
    has_keys = settings.store is not None and asyncio.run(_key_module().store_has_keys(settings.store))
    required = authentication is not None and (has_keys or settings.oidc is not None)
    if required or settings.open or is_loopback(settings.host):
        return required
    missing = "its store has no keys" if settings.store else "it has no store of keys"
    raise InputError(
        f"On {settings.host} the gateway would answer anyone who reaches it, as {missing}: make a key with "
        "`llmops key create` and name its store (--store URL), or allow requests without a key with --open."
    )


def exposure_summary(settings: GatewaySettings, keys_are_required: bool) -> str:
    """Return a text that says who can use the gateway, for the log line at the start."""
    clients = "this machine only" if is_loopback(settings.host) else f"anyone who reaches {settings.host}"
    if keys_are_required:
        return f"open to {clients}, with a key"
    later = ", until its store has a key" if settings.store and not settings.open else ""
    return f"open to {clients}, without a key{later}"


def _key_module() -> ModuleType:
    try:
        from llmops.gateway.auth import keys
    except ModuleNotFoundError as error:
        raise missing_extra(f"A store needs {error.name}, which is not installed", "store") from error
    return keys


def create_audit(url: str) -> CountingAudit:
    """Return the counter of rejections or findings that writes to the audit log of a store."""
    return CountingAudit(_key_module().StoreAuditLog(url))


def _oidc_directory(settings: OidcSettings, members: KeyDirectory | None) -> Directory:
    try:
        from llmops.gateway.auth.oidc import OidcDirectory
    except ModuleNotFoundError as error:
        raise missing_extra(f"The setting `oidc` needs {error.name}, which is not installed", "oidc") from error
    return OidcDirectory(settings, members)


def _credential_in(scope: Scope) -> str | None:
    """Return the client's credential: the Bearer token, or else the header `x-api-key`, or None.

    OpenAI's clients send a Bearer token, Anthropic's send `x-api-key`. The password of basic
    authentication counts as a Bearer token: a webhook such as Flagger's can carry a key only in its
    URL. For any other kind of authorization, the name of the kind is returned, which is then
    refused because it does not have the form of a key.
    """
    other, key = "", ""
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, token = value.decode("latin-1").partition(" ")
            if kind.lower() == "bearer" and token.strip():
                return str(token.strip())
            if kind.lower() == "basic" and (password := _basic_password(token)):
                return password
            other = other or kind
        elif name == b"x-api-key" and not key:
            key = value.decode("latin-1").strip()
    return key or other or None


def _basic_password(token: str) -> str:
    """Return the password of basic authentication, or an empty text if `token` is malformed."""
    try:
        return base64.b64decode(token.strip(), validate=True).decode().partition(":")[2]
    except ValueError:
        return ""
