"""Answers of other servers over HTTP, bounded before they are unpacked or parsed."""

from __future__ import annotations

from collections.abc import Mapping

import httpx


async def fetch_bounded(
    client: httpx.AsyncClient, url: str, most: int, headers: Mapping[str, str] | None = None
) -> bytes:
    """GET `url` and return the body of an answer with status 200.

    The answer is asked for without compression, and refused with it: a few kilobytes can unpack to gigabytes.

    Raises:
        httpx.HTTPStatusError: The answer has another status.
        ValueError: The answer has more than `most` bytes, or is compressed.
        httpx.HTTPError, httpx.InvalidURL: There is no answer.
    """
    asked = {**(headers or {}), "accept-encoding": "identity"}
    async with client.stream("GET", url, headers=asked) as response:
        if response.status_code != 200:
            request, told = response.request, f"{url} answers {response.status_code}"
            raise httpx.HTTPStatusError(told, request=request, response=response)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ValueError(f"{url} sends a compressed answer, which nobody asked for")
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > most:
                raise ValueError(f"{url} has more than {most:,} bytes")
    return bytes(body)
