"""Checks that protect the chat page and `/api` from other pages in the same browser.

A page of another site can make a browser send requests to the gateway, with the cookie of the chat
page or to a gateway without API keys. `OriginCheck` rejects requests of other origins.
`TrustedHostCheck` rejects host names that another site could make resolve to the gateway.
"""

from __future__ import annotations

from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import Scope

from llmops.gateway.auth.authentication import PAGE_ROUTES
from llmops.gateway.errors import ForbiddenError
from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext

KEY_COOKIE = "llmops_key"
# The page reads /v1/models if `llmops control` does not run beside the gateway.
_COOKIE_ROUTES = (
    *("/api/chat", "/api/conversations", "/api/models", "/api/usage", "/api/session", "/api/admin"),
    "/v1/models",
)
_SAME_ORIGIN = (b"same-origin", b"none")


class OriginCheck(Check):
    """A check that rejects requests of other origins.

    It also turns the cookie of the page into an `Authorization` header.
    """

    async def before(self, scope: Scope, context: RequestContext) -> None:
        """Check the origin. Runs before authentication.

        Raises:
            ForbiddenError: A page of another origin sent the request.
        """
        if not is_browser_route(context.route) and context.route != "/v1/models":
            return
        headers = context.headers
        origin, host = headers.get(b"origin"), headers.get(b"host", b"")
        if origin is not None and urlsplit(origin.decode("latin-1")).netloc.lower().encode() != host.lower():
            raise _other_origin()
        site = headers.get(b"sec-fetch-site", b"none")
        # a link on another page may lead to these pages
        if site not in _SAME_ORIGIN and context.route not in ("/", "/admin"):
            raise _other_origin()
        if b"authorization" in headers or b"x-api-key" in headers or not context.route.startswith(_COOKIE_ROUTES):
            return
        key = _cookie(headers.get(b"cookie", b""))
        if key:
            scope["headers"] = [*scope["headers"], (b"authorization", b"Bearer " + key.encode())]


class TrustedHostCheck(Check):
    """A check that rejects unknown host names from callers without an account.

    Such a caller must reach the gateway by a host name that the gateway knows.
    """

    def __init__(self, hosts: list[str]) -> None:
        """Create the check. `hosts` are the names of this gateway."""
        self._hosts = frozenset(host.lower() for host in hosts)

    async def before(self, scope: Scope, context: RequestContext) -> None:
        """Check the host. Runs after authentication.

        Raises:
            ForbiddenError: The name is unknown.
        """
        if not is_browser_route(context.route) or context.caller.tenant_id or not context.caller.scopes:
            return
        host = _host_of(context.headers.get(b"host", b"").decode("latin-1").lower())
        if not is_local_host(host) and host not in self._hosts:
            raise ForbiddenError(
                f"This gateway requires no API key and does not accept the host name '{host[:80]}'. Use its IP "
                "address, "
                "or add the name to the setting web.hosts.",
                code="unknown_host",
            )


def is_browser_route(route: str) -> bool:
    """Return True for the pages and the routes that they call."""
    return route.startswith("/api/") or route in PAGE_ROUTES


def is_local_host(host: str) -> bool:
    """Return True for `localhost` and IP addresses, which no DNS server can redirect."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def bearer_token(scope: Scope) -> str:
    """Return the key of an `Authorization: Bearer KEY`, empty if there is none."""
    header = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
    kind, _, key = header.partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def _host_of(header: str) -> str:
    """Return the header without the port and without the brackets of IPv6."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if ":" in header else header


def _cookie(header: bytes) -> str:
    try:
        cookie = SimpleCookie(header.decode("latin-1")).get(KEY_COOKIE)
    except CookieError:
        return ""
    return cookie.value if cookie is not None and cookie.value.isascii() and cookie.value.isprintable() else ""


def _other_origin() -> ForbiddenError:
    return ForbiddenError(
        "A page of another site sent this request; only this gateway's own page may.", code="foreign_origin"
    )
