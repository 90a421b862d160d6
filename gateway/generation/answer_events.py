"""The base class of server-sent events of an answer."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from llmops.gateway.errors import ApiError, CancelledStreamError, InternalError
from llmops.gateway.generation.answer import Answer, ChoiceDelta
from llmops.gateway.http.chunked_writer import ChunkedWriter
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.http.sse import EventSource, openai_error_event
from llmops.gateway.interfaces import TokenBatch
from llmops.gateway.logging_setup import current_request

log = logging.getLogger(__name__)


class AnswerEvents(EventSource):
    """The server-sent events of an answer.

    Subclasses render the deltas and the end in the form of their API.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._over = False
        self._late: Exception | None = None

    async def start(self, context: RequestContext) -> None:
        try:
            await self._answer.start()
        finally:
            answer = self._answer
            context.engine_seconds, context.detokenize_seconds = answer.engine_seconds, answer.detokenize_seconds

    def start_failed(self, error: Exception) -> None:
        self._late = error

    async def next(self) -> bytes | None:
        if self._over:
            return None
        try:
            if self._late is not None:
                raise self._late
            delta = await self._answer.next()
            if delta is not None:
                return self.render(delta)
        except CancelledStreamError:
            self._over = True
            return None
        except ApiError as error:
            self._over = True
            return self.failed(error)
        except Exception:
            # Status 200 is already sent, so a bug can be reported only inside the stream.
            log.exception("Request %s: the stream failed because of an unexpected error", current_request.get())
            self._over = True
            self._answer.error_finish = "error"
            return self.failed(InternalError("The gateway failed in the middle of the stream; send the request again."))
        self._over = True
        # The headers were sent before a failover, so a comment reports the failover; clients skip
        # comments.
        quality = self._answer.failover_quality
        return (f": continued {quality}\n\n".encode() if quality else b"") + self.end()

    def attach(self, writer: ChunkedWriter) -> None:
        """Let the engine's tokens be rendered and written to `writer` in one plain call.

        The coroutine of this stream is then not woken for each token; docs/decisions/0003 has the
        reason.
        """

        def sink(batch: TokenBatch) -> bool:
            if writer.blocked:
                return False
            data = self.render(self._answer.take(batch))
            if data:
                writer.write(data)
            return True

        self._answer.attach(sink)

    @abstractmethod
    def render(self, delta: ChoiceDelta) -> bytes: ...

    @abstractmethod
    def end(self) -> bytes: ...

    def failed(self, error: ApiError) -> bytes:
        return openai_error_event(error)

    def cancel(self) -> None:
        self._answer.cancel()

    def close(self) -> None:
        self._answer.close()


@contextmanager
def record_timings(answer: Answer, context: RequestContext) -> Iterator[None]:
    """Record in `context` how long the answer waited for the engine and its detokenizer.

    The times are recorded even after an error.
    """
    try:
        yield
    finally:
        context.engine_seconds, context.detokenize_seconds = answer.engine_seconds, answer.detokenize_seconds
