"""What protects the page and `/api` from other pages in the same browser.

A foreign page can make a browser send requests here, with the cookie of the page or to a gateway that asks for no key.
`OriginCheck` refuses what another origin sends; `TrustedHostCheck` refuses names that somebody else could make point here.
"""

from __future__ import annotations

from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import Scope

from llmops.gateway.auth.authentication import CHAT_PAGE_ROUTES
from llmops.gateway.errors import ForbiddenError
from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext

KEY_COOKIE = "llmops_key"
# the page reads the models there where no control runs beside the gateway
_COOKIE_ROUTES = ("/api/chat", "/api/conversations", "/api/models", "/api/usage", "/api/session", "/v1/models")
_SAME_ORIGIN = (b"same-origin", b"none")


class OriginCheck(Check):
    """Refuses requests of other origins, and puts the key of the page's cookie where a key is looked for."""

    async def before(self, scope: Scope, context: RequestContext) -> None:
        """Check the origin. Runs before the check for keys.

        Raises:
            ForbiddenError: A page of another origin sent this request.
        """
        if not is_browser_route(context.route) and context.route != "/v1/models":
            return
        given = context.headers
        origin, host = given.get(b"origin"), given.get(b"host", b"")
        if origin is not None and urlsplit(origin.decode("latin-1")).netloc.lower().encode() != host.lower():
            raise _foreign()
        site = given.get(b"sec-fetch-site", b"none")
        # a link on another page leads to this one
        if site not in _SAME_ORIGIN and context.route != "/":
            raise _foreign()
        if b"authorization" in given or b"x-api-key" in given or not context.route.startswith(_COOKIE_ROUTES):
            return
        key = _cookie(given.get(b"cookie", b""))
        if key:
            scope["headers"] = [*scope["headers"], (b"authorization", b"Bearer " + key.encode())]


class TrustedHostCheck(Check):
    """Refuses callers without an account who reach the gateway by a name that anybody could make point to it."""

    def __init__(self, hosts: list[str]) -> None:
        """`hosts` are the names that are known to be this gateway's."""
        self._hosts = frozenset(host.lower() for host in hosts)

    async def before(self, scope: Scope, context: RequestContext) -> None:
        """Check the host. Runs after the check for keys.

        Raises:
            ForbiddenError: The name is not among those that are known.
        """
        if not is_browser_route(context.route) or context.caller.tenant_id or not context.caller.scopes:
            return
        host = _host_of(context.headers.get(b"host", b"").decode("latin-1").lower())
        if not is_local_host(host) and host not in self._hosts:
            raise ForbiddenError(
                f"This gateway asks for no key, and does not know itself as '{host[:80]}': another page could have "
                "made that name. Use its IP address, or add the name to the setting web.hosts.",
                code="unknown_host",
            )


def is_browser_route(route: str) -> bool:
    """Return True for the page and for what it calls."""
    return route.startswith("/api/") or route in CHAT_PAGE_ROUTES


def is_local_host(host: str) -> bool:
    """Return True for names that nobody can make point elsewhere: `localhost` and IP addresses."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def bearer_token(scope: Scope) -> str:
    """Return the key of an `Authorization: Bearer KEY`, or an empty text."""
    given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
    kind, _, key = given.partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def _host_of(header: str) -> str:
    """Return the header without the port and without the brackets of IPv6."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if ":" in header else header


def _cookie(header: bytes) -> str:
    try:
        found = SimpleCookie(header.decode("latin-1")).get(KEY_COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None and found.value.isascii() and found.value.isprintable() else ""


def _foreign() -> ForbiddenError:
    return ForbiddenError(
        "A page of another site sent this request; only this gateway's own page may.", code="foreign_origin"
    )
