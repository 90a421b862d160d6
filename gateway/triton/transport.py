"""The transport interface: how requests reach an engine model, and how its tokens come back.

Per-request streams (`request_stream.py`) work with every Triton model of the contract; other transports are chosen by
what the model's card announces.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod

from grpc import aio

from llmops.gateway.interfaces import Engine, EngineRequest, TokenStream


class Transport(Engine):
    """An Engine over gRPC. One per engine model; `open` may be called from many tasks of one event loop."""

    name: str

    @abstractmethod
    async def open(self, request: EngineRequest) -> TokenStream:
        """Submit `request`. Raises UnavailableError when Triton cannot be reached."""

    async def close(self) -> None:
        """Release what the transport holds; open streams end with UnavailableError."""


# what a write raises when its call has ended, depending on who noticed first
WRITE_ERRORS = (aio.AioRpcError, aio.UsageError, asyncio.InvalidStateError)
