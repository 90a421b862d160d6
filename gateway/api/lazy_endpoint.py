"""Endpoints whose module is imported by their first request: what they need is an extra, or costs memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmops.distribution import install_command
from llmops.gateway.errors import NotFoundError


class LazyEndpoints:
    """An object that is made by `make` in a thread when it is first needed."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._lock = asyncio.Lock()
        self.made: Any = None

    async def get(self) -> Any:
        """Return the object. Raises NotFoundError if a library that it needs is not installed."""
        async with self._lock:
            if self.made is None:
                try:
                    self.made = await asyncio.to_thread(self._make)
                except ModuleNotFoundError as error:
                    raise NotFoundError(
                        f"This gateway keeps no conversations: {error.name} is not installed; whoever runs it "
                        f"installs the extra `store`: {install_command('store')}",
                        code="conversations_not_stored",
                    ) from error
            return self.made

    def endpoint(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that calls the method `name` of the object."""

        async def handle(request: Request) -> Response:
            response: Response = await getattr(await self.get(), name)(request)
            return response

        return handle
