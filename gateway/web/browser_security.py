"""Checks that protect the pages and `/api` from pages of other sites in the same browser.

A page of another site can make a browser send requests to the gateway, with the cookie of the chat
page or to a gateway without API keys. `OriginCheck` rejects requests from other origins.
`TrustedHostCheck` rejects host names that another site could make resolve to the gateway.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from ipaddress import ip_address

from starlette.types import Scope

from llmops.gateway.auth.authentication import HEALTH_PREFIX, PAGE_ROUTES
from llmops.gateway.errors import ForbiddenError
from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext

KEY_COOKIE = "llmops_key"
#: Maximum size of a cookie header that FastAPI may parse, in bytes. Bounds the time on the event
#: loop. The gateway reads its own cookie from longer headers, too.
MAX_COOKIE_BYTES = 4096
# Routes that accept the cookie. The page requests /v1/models if `llmops control` does not run
# beside the gateway.
_COOKIE_ROUTES = (
    *("/api/chat", "/api/conversations", "/api/models", "/api/usage", "/api/session", "/api/admin"),
    "/v1/models",
)
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:@]+))(?::\d*)?")
_SAME_ORIGIN = (b"same-origin", b"none")
# No attacker can register a name under these domains (RFC 6761, RFC 6762, ICANN's `.internal`;
# `svc` is Kubernetes' domain), nor a name without a dot.
_PRIVATE_DOMAINS = ("localhost", "local", "internal", "svc")


class OriginCheck(Check):
    """A check that rejects requests from other origins.

    The check also converts the cookie of the page to an `Authorization` header.
    """

    async def before(self, scope: Scope, context: RequestContext) -> None:
        """Check the origin. Runs before authentication.

        Raises:
            ForbiddenError: A page of another origin sent the request.
        """
        headers = context.headers
        if len(headers.get(b"cookie", b"")) > MAX_COOKIE_BYTES:
            # FastAPI parses cookies for every route, and takes 20 ms for 60 KB of escapes.
            scope["headers"] = [one for one in scope["headers"] if one[0] != b"cookie"]
        if not is_browser_route(context.route) and context.route != "/v1/models":
            if scope["method"] == "POST" and b"origin" in headers and _is_simple(headers):
                raise _other_origin()
            return
        origin, host = headers.get(b"origin"), headers.get(b"host", b"")
        # `urlsplit` raises exceptions for some texts that a client may send.
        if origin is not None and origin.lower().partition(b"://")[2] != host.lower():
            raise _other_origin()
        site = headers.get(b"sec-fetch-site", b"none")
        # A link on another site's page may lead to the gateway's pages.
        if site not in _SAME_ORIGIN and context.route not in ("/", "/admin"):
            raise _other_origin()
        if b"authorization" in headers or b"x-api-key" in headers or not context.route.startswith(_COOKIE_ROUTES):
            return
        key = _cookie(headers.get(b"cookie", b""))
        if key:
            scope["headers"] = [*scope["headers"], (b"authorization", b"Bearer " + key.encode())]


class TrustedHostCheck(Check):
    """A check that rejects unknown host names for callers without an account.

    These callers must reach the gateway by a host name that the gateway knows.
    """

    def __init__(self, hosts: list[str]) -> None:
        """Create the check. `hosts` are the host names of the gateway."""
        known = frozenset(host.lower() for host in hosts)

        @lru_cache(maxsize=256)
        def accepts(header: bytes) -> bool:
            host = _host_of(header.decode("latin-1").lower())
            return is_private_host(host) or host in known

        self._accepts = accepts

    def applies_to(self, method: str, route: str) -> bool:
        # A load balancer's health checks may name any host.
        return not route.startswith(HEALTH_PREFIX)

    async def before(self, scope: Scope, context: RequestContext) -> None:
        """Check the host name. Runs after authentication.

        Raises:
            ForbiddenError: The host name is unknown.
        """
        if context.caller.tenant_id or not context.caller.scopes:
            return
        header = context.headers.get(b"host", b"")
        if not self._accepts(header):
            host = _host_of(header.decode("latin-1"))
            raise ForbiddenError(
                f"This gateway requires no API key and does not accept the host name '{host[:80]}'. Use its IP "
                "address, or add the name to the setting web.hosts.",
                code="unknown_host",
            )


@lru_cache(maxsize=1024)
def is_browser_route(route: str) -> bool:
    """Return True for a route of the pages, or a route under /api/ that the pages call."""
    return route.startswith("/api/") or route in PAGE_ROUTES


def is_private_host(host: str) -> bool:
    """Return True for IP addresses and for names that no page on the internet can resolve to others."""
    if host and ("." not in host or host.endswith(tuple(f".{one}" for one in _PRIVATE_DOMAINS))):
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def bearer_token(scope: Scope) -> str:
    """Return the key of an `Authorization: Bearer KEY` header, empty without one."""
    header = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
    kind, _, key = header.partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def _is_simple(headers: Mapping[bytes, bytes]) -> bool:
    """Return True for a request that a browser sends to another origin without a preflight.

    The page that sent the request cannot read the response, but the request would still generate
    and store. A body declared as JSON makes the browser send a preflight first. A header with a key
    would, too, but a proxy may have added it.
    """
    own = headers[b"origin"].lower().partition(b"://")[2] == headers.get(b"host", b"").lower()
    # The parameters of a media type may contain anything.
    media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return not own and not media_type.endswith((b"/json", b"+json"))


def _host_of(header: str) -> str:
    """Return the host name without port and IPv6 brackets, empty for a malformed header."""
    found = _HOST.fullmatch(header)
    return (found[1] or found[2]) if found is not None else ""


def _cookie(header: bytes) -> str:
    """Return the key in a `Cookie` header, empty if the header has no key.

    The standard library's parser takes milliseconds for a long header, which any client can send.
    """
    prefix = f"{KEY_COOKIE}=".encode()
    found = next((part for part in map(bytes.strip, header.split(b";")) if part.startswith(prefix)), b"")
    value = found.removeprefix(prefix).strip(b'"').decode("latin-1")
    return value if value.isascii() and value.isprintable() else ""


def _other_origin() -> ForbiddenError:
    return ForbiddenError(
        "A page of another site sent this request, which is not allowed; open this gateway's own page instead.",
        code="foreign_origin",
    )
