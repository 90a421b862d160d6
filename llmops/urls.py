"""Hosts and URLs that the user names.

The module checks whether they are trustworthy, and reads a URL with a size limit.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import httpx


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_secure_url(url: str) -> bool:
    """Return True if the URL is HTTPS or on this machine. Raise ValueError for text that is no URL."""
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))


async def fetch_bounded(
    client: httpx.AsyncClient, url: str, max_bytes: int, headers: Mapping[str, str] | None = None
) -> bytes:
    """GET `url` and return the body of a response with status 200.

    Request the response without compression and reject a compressed one: a few kilobytes can unpack
    to gigabytes.

    Raises:
        httpx.HTTPStatusError: The response has another status.
        ValueError: The response has more than `max_bytes` bytes, or is compressed.
        httpx.HTTPError, httpx.InvalidURL: No response arrived.
    """
    import httpx

    _ = urlsplit(url).port  # raises ValueError above 65535, for which connecting raises OverflowError
    request_headers = {**(headers or {}), "accept-encoding": "identity"}
    async with client.stream("GET", url, headers=request_headers) as response:
        if response.status_code != 200:
            message = f"{url} answers {response.status_code}"
            raise httpx.HTTPStatusError(message, request=response.request, response=response)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ValueError(f"{url} sends a compressed response, although the request excludes compression")
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > max_bytes:
                raise ValueError(f"{url} has more than {max_bytes:,} bytes")
    return bytes(body)
