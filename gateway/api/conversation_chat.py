"""The endpoint POST /api/chat/completions, which continues stored conversations."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.api.chat_completions import CHAT_IGNORED_FIELDS
from llmops.gateway.api.generation_response import json_response
from llmops.gateway.api.ignored_fields import report_ignored_fields
from llmops.gateway.api.resumable_chats import ResumableChats, check_resumable
from llmops.gateway.conversations.chat_run import ChatRun
from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.generation.chat_generation import ChatGeneration, validate_chat
from llmops.gateway.generation.prompt_limits import max_rendered_characters
from llmops.gateway.http.request_body import validate_body
from llmops.gateway.http.request_context import RequestContext, context_of
from llmops.gateway.http.sse import DisconnectWatcher
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.schemas.chat_request import ChatRequest
from llmops.gateway.schemas.conversation_requests import ConversationChatRequest

if TYPE_CHECKING:
    from llmops.gateway.conversations.conversation_store import ConversationStore
    from llmops.gateway.conversations.conversation_turn import ConversationTurn
    from llmops.gateway.conversations.title_writer import TitleWriter


#: Number of tokens that a chat template is assumed to add to each message, such as role markers.
MESSAGE_OVERHEAD = 8
#: Number of tokens that a chat template is assumed to add to a prompt besides its messages, such as
#: a default system prompt.
TEMPLATE_OVERHEAD = 64


class TruncatedHistory(NamedTuple):
    """The messages of a conversation that fit into the model's context.

    Attributes:
        messages: The messages to send to the model.
        dropped: The number of older messages that were left out.
    """

    messages: list[dict[str, Any]]
    dropped: int


def reserved_output_tokens(model: GenerativeModel, wanted: int | None) -> int:
    """Return the number of tokens of the context to keep free for the answer.

    Args:
        model: The model.
        wanted: The requested maximum number of output tokens; None reserves a quarter of the
            context.
    """
    return min(wanted or model.card.max_seq_len // 4, model.card.max_seq_len - 1)


def truncate_history(messages: Sequence[dict[str, Any]], model: GenerativeModel, room: int) -> TruncatedHistory:
    """Drop the oldest turns that do not fit into the context of `model`.

    System messages at the beginning stay. A turn begins with a user message. The newest turn is
    always kept: whether it fits is checked when the request is prepared.

    Args:
        messages: The chat messages, the oldest first.
        model: The model, which counts tokens and has the context length.
        room: The number of tokens to keep free for the answer.
    """
    limit = model.card.max_seq_len - room - TEMPLATE_OVERHEAD
    texts = [_text(message) for message in messages]
    # A token stands for at least one byte, so few enough bytes need no tokenizer.
    if sum(len(text.encode()) + MESSAGE_OVERHEAD for text in texts) <= limit:
        return TruncatedHistory(list(messages), 0)

    def size(at: int) -> int:
        # Encoding stops at the context length, because a longer text does not fit anyway.
        ids = model.tokenizer.encode_beginning(texts[at], max(limit, 0), add_special_tokens=False)
        return len(ids) + MESSAGE_OVERHEAD

    first = next((at for at, one in enumerate(messages) if one["role"] not in ("system", "developer")), len(messages))
    starts = [at for at in range(first, len(messages)) if messages[at]["role"] == "user"] or [first]
    left = limit - sum(map(size, range(first)))
    keep, end = starts[-1], len(messages)
    for start in reversed(starts):
        for at in range(start, end):
            left -= size(at)
            if left < 0:
                break
        if left < 0:
            break
        keep = end = start
    if keep == starts[0]:
        keep = first  # An assistant message before the first question belongs to that turn.
    return TruncatedHistory([*messages[:first], *messages[keep:]], keep - first)


def _text(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls") or ()
    return f"{message.get('content') or ''}{''.join(call['function']['arguments'] for call in calls)}"


class ConversationChatEndpoints:
    """The endpoint of chats whose answers continue when the client disconnects.

    A chat can belong to a stored conversation.
    """

    def __init__(
        self,
        service: AppState,
        chats: ResumableChats,
        conversations: Callable[[], Awaitable[ConversationStore]],
        titles: Callable[[], TitleWriter] | None = None,
    ) -> None:
        """Create the endpoint.

        Args:
            service: The gateway's shared state.
            chats: The answers in progress.
            conversations: Opens the store of conversations.
            titles: Returns the writer of titles. None if titles are the first words of
                conversations.
        """
        self._service, self._chats, self._conversations, self._titles = service, chats, conversations, titles

    async def create(self, request: Request) -> Response:
        """Generate an answer, and store it if the request names a conversation."""
        context = context_of(request)
        body = await self._service.intake.load(ConversationChatRequest, request)
        model = await self._service.find_model(body.model, context, body, overflow=True)
        check_resumable(body)
        turn = await self._turn(body, context) if body.conversation_id else None
        if turn is None and body.after is not None:
            raise InvalidRequestError("'after' needs a conversation_id; add it, or leave 'after' out.", param="after")
        chat = await self._as_chat(body, turn, model, context)
        report_ignored_fields(context, self._service, body, CHAT_IGNORED_FIELDS)
        run_id = turn.run_id if turn is not None else f"chatcmpl-{secrets.token_hex(12)}"
        generation = ChatGeneration(self._service, chat, model, run_id, context)
        watcher = DisconnectWatcher(request.receive)

        async def run() -> ChatRun:
            started = await self._chats.start(generation, watcher, turn=turn, after=body.after)
            if self._titles is not None and turn is not None and (question := turn.first_question):
                started.task.add_done_callback(lambda _: self._write_title(started, turn, question, context))
            return started

        if body.stream:
            return self._chats.respond(run, watcher)
        try:
            return json_response(await self._chats.collect(await run(), watcher))
        finally:
            watcher.close()

    def _write_title(self, run: ChatRun, turn: ConversationTurn, question: str, context: RequestContext) -> None:
        if self._titles is not None and run.saved and run.finish in ("stop", "length"):
            content = run.state().content
            self._titles().schedule(turn.store, context.caller, turn.conversation_id, question, content)

    async def _turn(self, body: ConversationChatRequest, context: RequestContext) -> ConversationTurn:
        # SQLAlchemy is an optional dependency, and a gateway without conversations does not import
        # it.
        from llmops.gateway.conversations.conversation_turn import ConversationTurn

        store = await self._conversations()
        intake = self._service.intake
        branch = await store.read(
            context.caller, str(body.conversation_id), body.after, hold=lambda size: intake.hold(size, context)
        )
        new = [message.model_dump(exclude_none=True) for message in body.messages]
        price = partial(self._chats.price, context.arrived)
        return ConversationTurn(store, context.caller, branch, new, price, bool(body.continue_final_message))

    async def _as_chat(
        self,
        body: ConversationChatRequest,
        turn: ConversationTurn | None,
        model: GenerativeModel,
        context: RequestContext,
    ) -> ChatRequest:
        """Return the chat request with the conversation's history, cut to the model's context."""
        fields = body.model_dump(exclude_unset=True, by_alias=True, exclude={"conversation_id", "after", "messages"})
        messages = [message.model_dump(exclude_unset=True) for message in body.messages]
        if turn is not None:
            output_tokens = body.max_completion_tokens or body.max_tokens or self._service.default_tokens
            room = reserved_output_tokens(model, output_tokens)
            size = sum(len(_text(message)) for message in turn.history)
            cut = await self._service.text_threads.run(
                lambda: truncate_history(turn.history, model, room), size, context.caller.share
            )
            messages, context.dropped_messages = cut.messages, cut.dropped
        chat = validate_body(ChatRequest, {**fields, "messages": messages})
        validate_chat(chat, model, self._service.limits)
        context.work_bytes = max(context.work_bytes, max_rendered_characters(chat.messages))
        return chat
