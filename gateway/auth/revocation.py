"""Running answers of keys: `llmops key revoke --now` ends them."""

from __future__ import annotations

import asyncio
import logging

from starlette.types import Scope

from llmops.background import cancel_tasks
from llmops.gateway.auth.directory import Directory
from llmops.gateway.errors import UnavailableError
from llmops.gateway.http.chunked_writer import SERVER_SEND_KEY
from llmops.gateway.http.request_context import RequestContext

log = logging.getLogger(__name__)

#: Seconds between two polls for keys whose running answers must end. Three fit into the 30 s after
#: which a revoked key is refused.
REVOCATION_INTERVAL = 10.0


class RevocationWatch:
    """The requests with a key that are being answered. Nothing is looked up while there are none."""

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
            keys = {context.caller.key_id for context, _ in self._requests.values()}
            if not keys:
                self._watch = None
                return
            try:
                ended = await self._directory.ended(sorted(keys))
            except UnavailableError:
                # the directory has logged that it is unavailable
                continue
            for context, scope in list(self._requests.values()):
                if context.caller.key_id in ended:
                    _abort_request(context, scope)


def _abort_request(context: RequestContext, scope: Scope) -> None:
    """End the request as if its client had left."""
    log.info("Request %s: its key was revoked with --now; the answer ends", context.request_id)
    if context.background_task is not None:
        context.background_task.cancel()
    transport = getattr(getattr(scope.get(SERVER_SEND_KEY), "__self__", None), "transport", None)
    if transport is not None:
        transport.abort()
