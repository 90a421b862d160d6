"""Gateways as processes that can be killed, forked from a process that has imported the gateway already."""

import asyncio
import multiprocessing
from collections.abc import Mapping
from typing import Any

import httpx

from llmops.gateway.launcher import run
from llmops.gateway.settings import GatewaySettings
from tests.support.servers import free_port
from tests.support.waiting import GENEROUS, eventually

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.support.forked_gateways"])


def _serve(settings: Mapping[str, Any]) -> None:
    run(GatewaySettings(**settings))


class ForkedGateway:
    """A gateway in a process of its own, and its client."""

    def __init__(self, **settings: Any) -> None:
        self.port = port = settings.pop("port", None) or free_port()
        self.process = _FORKS.Process(target=_serve, args=({**settings, "port": port},), daemon=True)
        self.process.start()
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=GENEROUS)

    async def ready(self) -> "ForkedGateway":
        """Wait until it is ready."""

        async def is_ready() -> bool:
            assert self.process.is_alive(), "the gateway ended"
            try:
                return (await self.client.get("/health/ready")).status_code == 200
            except httpx.TransportError:
                return False

        await eventually(is_ready)
        return self

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()

    async def close(self) -> None:
        """Send SIGTERM, and wait for the end."""
        await self.client.aclose()
        self.process.terminate()
        await asyncio.to_thread(self.process.join)
