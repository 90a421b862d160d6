"""POST /api/chat/completions, and the stream of a running answer for readers who come back to it."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.api.chat_completions import CHAT_IGNORED_FIELDS, message_of
from llmops.gateway.api.generation_response import json_response
from llmops.gateway.api.ignored_fields import report_ignored_fields
from llmops.gateway.api.openai_chunks import DONE_EVENT, ChatChunks, usage_counts
from llmops.gateway.conversations.chat_run import ChatRun, ChatRunRegistry, parse_last_event_id
from llmops.gateway.conversations.truncation import reserved_output_tokens, truncate_history
from llmops.gateway.errors import GoneError, InvalidRequestError, NotFoundError, UnsupportedError
from llmops.gateway.generation.answer import Answer
from llmops.gateway.generation.answer_events import record_timings
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.generation.chat_generation import start_chat, validate_chat
from llmops.gateway.generation.parsers.output_processor import ContentDelta
from llmops.gateway.generation.prompt_limits import max_rendered_characters
from llmops.gateway.http.request_body import validate_body
from llmops.gateway.http.request_context import RequestContext, context_of
from llmops.gateway.http.sse import DisconnectWatcher, EventSource, EventStreamResponse
from llmops.gateway.interfaces import Usage
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.schemas.chat_request import ChatRequest
from llmops.gateway.schemas.conversation_requests import ConversationChatRequest

if TYPE_CHECKING:
    from llmops.gateway.conversations.conversation_store import ConversationStore
    from llmops.gateway.conversations.conversation_turn import ConversationTurn

Price = Callable[[str, Usage], int | None]
_RUN_ID = re.compile(r"chatcmpl-[0-9a-f]{24}")


class ConversationChatEndpoints:
    """The endpoints of chats whose answers outlive their connection.

    A chat belongs to a stored conversation or to none.
    """

    def __init__(
        self,
        service: AppState,
        runs: ChatRunRegistry,
        conversations: Callable[[], Awaitable[ConversationStore]],
        price: Price,
    ) -> None:
        """Create the endpoints.

        Args:
            service: The gateway's shared state.
            runs: The answers in progress.
            conversations: Opens the store of conversations.
            price: Returns the price of what a model used, in micro-dollars, or None if the model
                has no price.
        """
        self._service, self._runs, self._conversations, self._price = service, runs, conversations, price

    async def create(self, request: Request) -> Response:
        """Generate an answer, and store it if it belongs to a conversation."""
        context = context_of(request)
        body = await self._service.intake.load(ConversationChatRequest, request)
        model = await self._service.find_model(body.model, context, body, overflow=True)
        if (body.n or 1) > 1:
            raise UnsupportedError("A stream that resumes has one answer; leave out n.", param="n")
        if body.logprobs:
            raise UnsupportedError("logprobs are supported in /v1/chat/completions only.", param="logprobs")
        turn = await self._turn(body, context) if body.conversation_id else None
        if turn is None and body.after is not None:
            raise InvalidRequestError("'after' needs a conversation_id.", param="after")
        chat = await self._as_chat(body, turn, model, context)
        report_ignored_fields(context, self._service, body, CHAT_IGNORED_FIELDS)
        run_id = turn.run_id if turn is not None else f"chatcmpl-{secrets.token_hex(12)}"
        watcher = DisconnectWatcher(request.receive)

        async def run() -> ChatRun:
            answer = await start_chat(self._service, chat, model, run_id, context, whole=False)
            watcher.notify(answer.cancel)
            with record_timings(answer, context):
                await answer.start()
            try:
                stored = await turn.begin(run_id, model.name, body.after) if turn is not None else None
            except BaseException:
                answer.close()
                raise
            chunks = ResumableChunks(run_id, body, model.name, stored, context.dropped_messages, self._price)
            chat_run = ChatRun(run_id, context.caller.owner, answer, chunks, turn.save if turn is not None else None)
            self._runs.add(chat_run)
            context.background_task = chat_run.task
            return chat_run

        if not body.stream:
            try:
                chat_run = await run()
                watcher.notify(chat_run.stop)
                chat_run.enter()
                await chat_run.task
                if chat_run.error is not None:
                    raise chat_run.error
                return json_response(chat_run.chunks.complete(chat_run))  # type: ignore[attr-defined]
            finally:
                watcher.close()

        async def open_source() -> EventSource:
            reader = (await run()).read()
            watcher.notify(reader.cancel)
            return reader

        return EventStreamResponse(open_source, watcher, self._service.timeouts)

    async def resume(self, request: Request) -> Response:
        """Send the events after `Last-Event-ID`, to the owner of the answer."""
        run = self._find(request)
        after = parse_last_event_id(request.headers.get("last-event-id"), run)
        watcher = DisconnectWatcher(request.receive)

        async def open_source() -> EventSource:
            reader = run.read(after)
            watcher.notify(reader.cancel)
            return reader

        return EventStreamResponse(open_source, watcher, self._service.timeouts)

    async def stop(self, request: Request) -> Response:
        """End an answer early, and store what there is of it."""
        run = self._find(request)
        run.stop()
        await run.task
        return json_response({"id": run.id, "object": "chat.completion", "status": run.status, "saved": run.saved})

    def _find(self, request: Request) -> ChatRun:
        run_id, owner = request.path_params["run_id"], context_of(request).caller.owner
        run = self._runs.find(run_id)
        if run is not None and run.owner == owner:
            return run
        if run is not None or not _RUN_ID.fullmatch(run_id):
            raise NotFoundError(f"There is no answer with id '{run_id[:40]}'.")
        raise GoneError(
            "This answer is not generated here any longer: it ended more than a minute ago, or its gateway did. What "
            "was stored of it is in its conversation.",
            code="stream_gone",
        )

    async def _turn(self, body: ConversationChatRequest, context: RequestContext) -> ConversationTurn:
        # SQLAlchemy is an extra, and a gateway without conversations does not import it
        from llmops.gateway.conversations.conversation_turn import ConversationTurn

        store = await self._conversations()
        branch = await store.read(context.caller, str(body.conversation_id), body.after)
        new = [message.model_dump(exclude_none=True) for message in body.messages]
        size = sum(message.size for message in branch.messages)
        self._service.intake.hold(size, context)
        return ConversationTurn(
            store, context.caller, branch, new, self._price, continues=bool(body.continue_final_message)
        )

    async def _as_chat(
        self,
        body: ConversationChatRequest,
        turn: ConversationTurn | None,
        model: GenerativeModel,
        context: RequestContext,
    ) -> ChatRequest:
        """Return the request with the history of the conversation, cut to the model's context."""
        fields = body.model_dump(exclude_unset=True, by_alias=True, exclude={"conversation_id", "after", "messages"})
        messages = [message.model_dump(exclude_unset=True) for message in body.messages]
        if turn is not None:
            output_tokens = body.max_completion_tokens or body.max_tokens or self._service.default_tokens
            room = reserved_output_tokens(model, output_tokens)
            size = sum(len(str(message.get("content"))) for message in turn.history)
            cut = await self._service.text_threads.run(
                lambda: truncate_history(turn.history, model, room), size, context.caller.share
            )
            messages, context.dropped_messages = cut.messages, cut.dropped
        chat = validate_body(ChatRequest, {**fields, "messages": messages})
        validate_chat(chat, model, self._service.limits)
        context.work_bytes = max(context.work_bytes, max_rendered_characters(chat.messages))
        return chat


class ResumableChunks(ChatChunks):
    """A stream of chat.completion.chunk events that a client can resume.

    The first event says where the answer is stored, the last says what it used and costs.
    """

    def __init__(
        self,
        run_id: str,
        body: ChatRequest,
        model: str,
        conversation: dict[str, Any] | None,
        dropped: int,
        price: Price,
    ) -> None:
        # the last event has the usage, whatever `stream_options` say
        super().__init__(run_id, body.model_copy(update={"stream_options": None}), int(time.time()), 1)
        self._id, self._model, self._served_by, self._price = run_id, body.model, model, price
        self._storage = {"conversation": conversation, "dropped_messages": dropped}

    def role(self, index: int) -> bytes:
        """Return the chunk that opens the answer."""
        return super().role(index).removesuffix(b"}\n\n") + b"," + json.dumps(self._storage).encode()[1:] + b"\n\n"

    def end(self, run: ChatRun) -> bytes:
        """Return the last events."""
        finish = json.dumps(_finish_reason(run))
        head = f'{self._openings[0]}}},"logprobs":null,"finish_reason":{finish}}}],'
        return (head + json.dumps(self._outcome(run))[1:] + "\n\n").encode() + DONE_EVENT

    def complete(self, run: ChatRun) -> dict[str, Any]:
        """Return the answer of a request without a stream."""
        pieces = run.log.pieces() or [ContentDelta("")]
        choice = {"index": 0, "message": message_of(pieces), "logprobs": None, "finish_reason": _finish_reason(run)}
        head = {"id": self._id, "object": "chat.completion", "created": int(time.time()), "model": self._model}
        return {**head, "choices": [choice], **self._outcome(run), **self._storage}

    def _outcome(self, run: ChatRun) -> dict[str, Any]:
        answer: Answer = run.answer
        micros = self._price(self._served_by, answer.usage)
        cost = None if micros is None else micros / 1e6
        outcome = {"served_by": self._served_by, "usage": usage_counts(answer), "cost_usd": cost}
        return {**outcome, "status": run.status, "saved": run.saved}


def _finish_reason(run: ChatRun) -> str | None:
    """Return OpenAI's finish reason, None for an answer that was stopped or failed."""
    return run.finish if run.finish in ("stop", "length", "tool_calls", "content_filter") else None
