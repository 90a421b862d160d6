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

from llmops.gateway.answers.answer import Answer
from llmops.gateway.answers.chat import check_chat, start_chat
from llmops.gateway.answers.events import timed
from llmops.gateway.answers.parsers.pieces import Text
from llmops.gateway.answers.service import Service
from llmops.gateway.answers.sizes import characters
from llmops.gateway.conversations.chat_run import ChatRun, ChatRuns, Reader, event_number
from llmops.gateway.conversations.history import answer_room, cut_to_context
from llmops.gateway.endpoints.chat import IGNORED, message_of
from llmops.gateway.endpoints.chunks import DONE, ChatChunks, usage_of
from llmops.gateway.endpoints.common import StartingEvents, json_response
from llmops.gateway.endpoints.ignored_fields import note_ignored
from llmops.gateway.errors import GoneError, InvalidRequestError, NotFoundError, UnsupportedError
from llmops.gateway.fleet.serving import ServedModel
from llmops.gateway.http.body import validate
from llmops.gateway.http.context import RequestContext, context_of
from llmops.gateway.http.events import EventSource, EventStream
from llmops.gateway.http.failures import error_event
from llmops.gateway.http.watch import ClientWatch
from llmops.gateway.messages import Usage
from llmops.gateway.openai.chat import ChatRequest
from llmops.gateway.openai.conversations import ConversationChatRequest

if TYPE_CHECKING:
    from llmops.gateway.conversations.conversation_store import ConversationStore
    from llmops.gateway.conversations.turns import Turn

Price = Callable[[str, Usage], int | None]
_RUN_ID = re.compile(r"chatcmpl-[0-9a-f]{24}")


class ConversationChat:
    """The endpoints; `create` answers, `resume` reads an answer again, `stop` ends it."""

    def __init__(
        self,
        service: Service,
        runs: ChatRuns,
        conversations: Callable[[], Awaitable[ConversationStore]],
        price: Price,
    ) -> None:
        """Create them. `conversations` opens the store, `price` is micro-dollars of what a model used."""
        self._service, self._runs, self._conversations, self._price = service, runs, conversations, price

    async def create(self, request: Request) -> Response:
        context = context_of(request)
        body = await self._service.intake.load(ConversationChatRequest, request)
        model = self._service.models.get(body.model, context.caller)
        if (body.n or 1) > 1:
            raise UnsupportedError("A stream that resumes has one answer; leave out n.", param="n")
        if body.logprobs:
            raise UnsupportedError("logprobs are supported in /v1/chat/completions only.", param="logprobs")
        turn = await self._turn(body, context) if body.conversation_id else None
        if turn is None and body.after is not None:
            raise InvalidRequestError("'after' needs a conversation_id.", param="after")
        chat = await self._as_chat(body, turn, model, context)
        note_ignored(context, self._service, body, IGNORED)
        run_id = turn.run_id if turn is not None else f"chatcmpl-{secrets.token_hex(12)}"
        watch = ClientWatch(request.receive)

        async def run() -> ChatRun:
            whole = not body.stream
            answer = await start_chat(self._service, chat, model, run_id, context, whole=False)
            watch.tell(answer.cancel)
            with timed(answer, context):
                await answer.start()
            try:
                told = await turn.begin(run_id, model.name, body.after) if turn is not None else None
            except BaseException:
                answer.close()
                raise
            chunks = ResumableChunks(run_id, body.model, told, context.dropped, self._price)
            save = turn.save if turn is not None else None
            made = ChatRun(run_id, context.caller.owner, answer, chunks, save)
            if whole:
                watch.tell(made.stop)
            self._runs.add(made)
            context.later = made.task
            return made

        if not body.stream:
            try:
                made = await run()
                made.enter()
                await made.task
                if made.error is not None:
                    raise made.error
                return json_response(made.chunks.whole(made))  # type: ignore[attr-defined]
            finally:
                watch.close()

        async def begin() -> EventSource:
            reader = (await run()).read()
            watch.tell(reader.cancel)
            return reader

        return self._stream(StartingEvents(begin, error_event), watch)

    async def resume(self, request: Request) -> Response:
        """Send the events after `Last-Event-ID`, to the owner of the answer."""
        run = self._find(request)
        after = event_number(request.headers.get("last-event-id"), run)
        watch = ClientWatch(request.receive)
        reader: Reader = run.read(after)
        watch.tell(reader.cancel)
        return self._stream(reader, watch)

    async def stop(self, request: Request) -> Response:
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

    async def _turn(self, body: ConversationChatRequest, context: RequestContext) -> Turn:
        # SQLAlchemy is an extra, and a gateway without conversations does not load it
        from llmops.gateway.conversations.turns import Turn

        store = await self._conversations()
        branch = await store.read(context.caller, str(body.conversation_id), body.after)
        new = [message.model_dump(exclude_none=True) for message in body.messages]
        size = sum(message.size for message in branch.messages)
        self._service.intake.hold(size, context)
        return Turn(store, context.caller, branch, new, self._price, continues=bool(body.continue_final_message))

    async def _as_chat(
        self, body: ConversationChatRequest, turn: Turn | None, model: ServedModel, context: RequestContext
    ) -> ChatRequest:
        """Return the request with the history of the conversation, cut to the model's context."""
        given = body.model_dump(exclude_unset=True, by_alias=True, exclude={"conversation_id", "after", "messages"})
        messages = [message.model_dump(exclude_unset=True) for message in body.messages]
        if turn is not None:
            wanted = body.max_completion_tokens or body.max_tokens or self._service.default_tokens
            room, size = answer_room(model, wanted), sum(len(str(one.get("content"))) for one in turn.history)
            cut = await self._service.text_threads.run(
                lambda: cut_to_context(turn.history, model, room), size, context.caller.share
            )
            messages, context.dropped = cut.messages, cut.dropped
        chat = validate(ChatRequest, {**given, "messages": messages})
        check_chat(chat, model, self._service.limits)
        context.size = max(context.size, characters(chat.messages))
        return chat

    def _stream(self, source: EventSource, watch: ClientWatch) -> Response:
        timeouts = self._service.timeouts
        return EventStream(source, watch, patience=timeouts.client, keepalive=timeouts.keepalive)


class ResumableChunks(ChatChunks):
    """chat.completion.chunk events; the first says where the answer is stored, the last what it used and costs."""

    def __init__(
        self, run_id: str, model: str, conversation: dict[str, Any] | None, dropped: int, price: Price
    ) -> None:
        super().__init__(run_id, model, int(time.time()), 1, include_usage=False)
        self._id, self._model, self._price = run_id, model, price
        self._told = {"conversation": conversation, "dropped_messages": dropped}

    def role(self, index: int) -> bytes:
        return super().role(index).removesuffix(b"}\n\n") + b"," + json.dumps(self._told).encode()[1:] + b"\n\n"

    def end(self, run: ChatRun) -> bytes:
        finish = json.dumps(_told_finish(run))
        head = f'{self._openings[0]}}},"logprobs":null,"finish_reason":{finish}}}],'
        return (head + json.dumps(self._used(run))[1:] + "\n\n").encode() + DONE

    def whole(self, run: ChatRun) -> dict[str, Any]:
        """Return the answer of a request without a stream."""
        pieces = run.log.pieces() or [Text("")]
        choice = {"index": 0, "message": message_of(pieces), "logprobs": None, "finish_reason": _told_finish(run)}
        head = {"id": self._id, "object": "chat.completion", "created": int(time.time()), "model": self._model}
        return {**head, "choices": [choice], **self._used(run), **self._told}

    def _used(self, run: ChatRun) -> dict[str, Any]:
        answer: Answer = run.answer
        micros = self._price(self._model, answer.usage)
        cost = None if micros is None else micros / 1e6
        return {"usage": usage_of(answer), "cost_usd": cost, "status": run.status, "saved": run.saved}


def _told_finish(run: ChatRun) -> str | None:
    return run.finish if run.finish in ("stop", "length", "tool_calls", "content_filter") else None
