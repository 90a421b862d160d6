"""A short cut for the bodies of event streams: past the middlewares, which have no business with single tokens."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

KEY = "llmops.direct_send"


class DirectSend:
    """Outermost of all: leaves the server's own `send` in the scope. Starts and errors still go through every layer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[KEY] = send
        await self._app(scope, receive, send)


def direct_send(scope: Scope, send: Send) -> Send:
    """The server's own `send`, or `send` where the application runs without a DirectSend around it."""
    direct: Send = scope.get(KEY, send)
    return direct
