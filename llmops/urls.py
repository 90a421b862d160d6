"""Checks of hosts and URLs that a user names, and a download with a size limit."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import httpx


#: Addresses of clouds' metadata services that are not link-local: AWS over IPv6, and Alibaba.
METADATA_ADDRESSES = frozenset({"fd00:ec2::254", "100.100.100.200"})

#: IPv6 prefixes that a NAT translates to the IPv4 address in the last 32 bits.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_metadata_address(host: str) -> bool:
    """Return True if an IP address is link-local or belongs to a cloud's metadata service.

    A metadata service gives the credentials of a machine to every process on the machine.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        embedded = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            embedded = ipaddress.IPv4Address(address.packed[-4:])
        if embedded is not None:
            return is_metadata_address(str(embedded))
    return address.is_link_local or str(address) in METADATA_ADDRESSES


async def refuse_metadata_address(request: httpx.Request) -> None:
    """Make a request fail if its connection leads to a metadata service.

    The function is a hook of `AsyncClient` that runs after connecting and before sending, because a
    name may resolve to another address each time.
    """
    request.extensions = {**request.extensions, "trace": _check_connection}


async def _check_connection(event: str, details: Mapping[str, Any]) -> None:
    import httpx

    if event != "connection.connect_tcp.complete":
        return
    host = details["return_value"].get_extra_info("server_addr")[0]
    if is_metadata_address(host):
        await details["return_value"].aclose()
        raise httpx.ConnectError(f"{host} is a link-local address, to which control sends nothing; name another host")


def is_loopback(host: str) -> bool:
    """Return True if `host` is a loopback address or name, which only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_secure_url(url: str) -> bool:
    """Return True if a text is a URL with HTTPS or a loopback host."""
    if http_url_problem(url):
        return False
    parts = urlsplit(url)
    return parts.scheme == "https" or is_loopback(parts.hostname or "")


def http_url_problem(text: str) -> str:
    """Return the reason why `text` is not the URL of an HTTP server, or an empty text if it is one."""
    try:
        parts = urlsplit(text)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            return "it does not begin with http://HOST"
        if parts.port == 0:
            return "no server listens on port 0"
        parts.hostname.encode("idna")
    except UnicodeError:
        return "its host cannot be a name in DNS"
    except ValueError:
        # The error's text has the port, which may be a password with an unescaped slash.
        return "its host or port is malformed"
    return ""


def without_secrets(url: str) -> str:
    """Return a URL for the log, without its user, password and query, which may contain secrets.

    A text that is not a URL, or has an @ behind the host, loses everything before its last @ and
    after its first question mark: a password may have an unescaped slash, question mark or #.
    """
    try:
        parts = urlsplit(url)
        if parts.hostname and parts.port != 0 and "@" not in f"{parts.path}{parts.query}{parts.fragment}":
            return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    except ValueError:
        pass
    before, _, rest = url.rpartition("@")
    # An @ behind a question mark or # may also belong to a secret in the query.
    return "…" if "?" in before or "#" in before else rest.partition("?")[0]


def is_usable_key(key: str) -> bool:
    """Return True if a header can hold an API key: printable ASCII characters, at least one."""
    return bool(key) and key.isascii() and key.isprintable()


def failure_reason(error: Exception) -> str:
    """Return the reason of a failed request, without the URL and headers, which may contain a secret."""
    import httpx

    if isinstance(error, httpx.InvalidURL):
        return "its URL is malformed"
    if isinstance(error, httpx.LocalProtocolError):
        return "a header has a character that HTTP does not allow"
    if isinstance(error, httpx.HTTPStatusError):
        return f"status {error.response.status_code}"
    return str(error) or type(error).__name__


async def fetch_bounded(
    client: httpx.AsyncClient, url: str, max_bytes: int, headers: Mapping[str, str] | None = None
) -> bytes:
    """Send a GET request and return the body of a response with status 200.

    The request excludes compression, and a compressed response is an error, because a few kilobytes
    can unpack to gigabytes. Error messages contain no secrets of the URL.

    Raises:
        httpx.HTTPStatusError: The response has another status.
        ValueError: The text is not an HTTP URL, or the response has more than `max_bytes` bytes or
            is compressed.
        httpx.HTTPError, httpx.InvalidURL: The request got no response.
    """
    import httpx

    place = without_secrets(url)
    # Without this check, connecting to a port above 65535 would raise OverflowError, and errors of
    # httpx would quote a part of a password that is read as the port. A path belongs to the
    # client's base URL.
    if not url.startswith("/") and (problem := http_url_problem(url)):
        raise ValueError(f"{place} is not an HTTP URL ({problem})")
    request_headers = {**(headers or {}), "accept-encoding": "identity"}
    async with client.stream("GET", url, headers=request_headers) as response:
        if response.status_code != 200:
            message = f"{place} answers {response.status_code}"
            raise httpx.HTTPStatusError(message, request=response.request, response=response)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ValueError(f"{place} sends a compressed response, although the request excludes compression")
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > max_bytes:
                raise ValueError(f"{place} has more than {max_bytes:,} bytes")
    return bytes(body)
