"""Answers that continue when their client disconnects and, with Redis, when their gateway is lost.

These are chats whose streams can be resumed, and responses in the background. The module finds an
answer by its id: an answer that this process generates, or an answer of another gateway, which it
follows.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from llmops.background import TaskSet
from llmops.clocks import utc_now
from llmops.gateway.api.generation_response import json_response
from llmops.gateway.api.openai_chunks import DONE_EVENT, ChatChunks, message_of, usage_counts
from llmops.gateway.conversations.answer_run import (
    AnswerFormat,
    AnswerLog,
    AnswerReader,
    AnswerRun,
    last_event_number,
    replay_batches,
)
from llmops.gateway.conversations.background_response import BackgroundFormat, BackgroundSaver
from llmops.gateway.conversations.chat_run import ChatRun, ChatRunRegistry, EndedAnswer
from llmops.gateway.conversations.response_run import ResponseSaver
from llmops.gateway.conversations.response_store import ResponseStore
from llmops.gateway.errors import (
    ApiError,
    GoneError,
    InternalError,
    ModelNotFoundError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    log_detail,
)
from llmops.gateway.generation.answer import Answer
from llmops.gateway.generation.answer_events import record_timings
from llmops.gateway.generation.app_state import AppState, BegunAnswer
from llmops.gateway.generation.chat_generation import ChatGeneration
from llmops.gateway.generation.parsers.output_processor import ContentDelta
from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext, context_of
from llmops.gateway.http.sse import DisconnectWatcher, EventSource, EventStreamResponse
from llmops.gateway.interfaces import FINISH_REASONS, Caller, Outcome, Usage, shared_answer_id
from llmops.gateway.logging_setup import request_logger
from llmops.gateway.routing.providers import ProviderModel
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.schemas.chat_request import ChatRequest
from llmops.input_files import MALFORMED

if TYPE_CHECKING:
    from llmops.gateway.conversations.checkpoints import AnswerCheckpoint, CheckpointStore, ClaimedAnswer
    from llmops.gateway.conversations.conversation_store import ConversationStore
    from llmops.gateway.conversations.conversation_turn import ConversationTurn
    from llmops.gateway.conversations.followed_run import FollowedRun

log = request_logger(__name__)

Price = Callable[[datetime, str, Usage], int | None]
#: Maximum number of times that gateways take over an answer. A request that crashes its gateway
#: must not crash all of them.
MAX_TAKEOVERS = 3
#: Seconds that an answer which was taken over waits for its model and for a free slot. A gateway
#: that has just started needs a moment to find its models.
ADOPTION_TIMEOUT = 30.0
#: Seconds between two attempts to continue an answer. Bounds the work of attempts that fail.
ADOPTION_INTERVAL = 0.5
_RUN_ID = re.compile(r"chatcmpl-[0-9a-f]{24}")


class AnswerRecord(BaseModel):
    """The request of an answer, from which any gateway can replay or continue the answer.

    Attributes:
        caller: The caller. A gateway that takes over does not look the API key up again.
        model: The name of the model that answers, even if the request names an alias.
        body: The chat request, with the history of its conversation.
        created: The Unix time of the answer's events, in seconds.
        arrived: The time when the request arrived, whose price applies.
        prompt_tokens: The number of tokens in the prompt.
        max_tokens: The maximum number of tokens in the answer.
        reserved_tokens: The number of tokens reserved from the caller's quotas.
        version: The version of the model, empty for a model without versions.
        event_id: The id of the usage event, empty if the request is not billed.
        openai: True if the events have OpenAI's format.
        conversation: The fields of the conversation that the first event contains.
        dropped: The number of messages that did not fit into the context.
        stored: The stored message that receives the answer, as a dumped AnswerReference.
        response: The format of a response in the background, None for a chat.
    """

    # A key without an end is valid until infinity, which JSON cannot represent.
    model_config = ConfigDict(ser_json_inf_nan="constants")

    caller: Caller
    model: str
    body: dict[str, Any]
    created: int
    prompt_tokens: int
    max_tokens: int
    reserved_tokens: int = 0
    version: str = ""
    event_id: str = ""
    openai: bool = False
    conversation: dict[str, Any] | None = None
    dropped: int = 0
    stored: dict[str, Any] | None = None
    response: BackgroundFormat | None = None
    arrived: datetime = Field(default_factory=utc_now)

    @classmethod
    def decode(cls, data: bytes) -> AnswerRecord:
        """Read a record.

        `json` parses the record because pydantic's parser limits nesting, and the record nests the
        body one level deeper than the request did.
        """
        return cls.model_validate(json.loads(data))

    @property
    def request(self) -> ChatRequest:
        """Return the chat request, parsed."""
        return ChatRequest.model_validate(self.body)

    def context(self) -> RequestContext:
        """Return a context in which this gateway works on the request."""
        context = RequestContext(f"req_{time.time_ns():x}", caller=self.caller, work_bytes=len(str(self.body)))
        context.model, context.arrived = self.model, self.arrived
        return context

    def form(self, run_id: str, chat: ChatRequest, price: Price) -> AnswerFormat:
        """Return the format of the answer's events.

        Args:
            run_id: The id of the answer.
            chat: The chat request.
            price: Returns the price of a request's usage at a time.
        """
        if self.response is not None:
            return self.response
        if self.openai:
            return ResumableOpenAIChunks(run_id, chat, self.created)
        price_then = partial(price, self.arrived)
        return ResumableChunks(run_id, chat, self.model, self.created, self.conversation, self.dropped, price_then)


class ResumableChats:
    """The answers of a gateway that continue when their client disconnects.

    Attributes:
        runs: The answers that this gateway generates.
        price: Returns the price of a request's usage at a time in micro-dollars, or None.
    """

    def __init__(
        self,
        service: AppState,
        runs: ChatRunRegistry,
        conversations: Callable[[], Awaitable[ConversationStore]],
        responses: ResponseStore,
        price: Price,
        checkpoints: CheckpointStore | None,
        may_store: Callable[[str], bool],
        checks: Sequence[Check],
    ) -> None:
        """Create the collection of answers.

        Args:
            service: The gateway's shared state.
            runs: The answers in progress.
            conversations: Opens the store of conversations.
            responses: The store of responses.
            price: Returns the price of a request's usage at a time in micro-dollars, or None if the
                model has no price.
            checkpoints: The state of answers that gateways share. None without Redis.
            may_store: Returns True if a tenant's data may be stored.
            checks: The checks to run for an answer that is taken over from a lost gateway.
        """
        self._service, self.runs, self._conversations, self.price = service, runs, conversations, price
        self._checkpoints, self._may_store, self._checks, self._responses = checkpoints, may_store, checks, responses
        self._followed: dict[str, FollowedRun] = {}
        self._adoptions = TaskSet()
        # One lock per owner, so that an owner's long requests do not delay other owners.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # -- new answers

    async def start(
        self,
        generation: ChatGeneration,
        watcher: DisconnectWatcher,
        *,
        openai: bool = False,
        turn: ConversationTurn | None = None,
        after: str | None = None,
    ) -> ChatRun:
        """Start a chat's answer.

        Args:
            generation: The validated request.
            watcher: Cancels the answer if the client disconnects before the first token.
            openai: True if the events have OpenAI's format.
            turn: The turn of a conversation that the answer belongs to.
            after: The id of the message that the turn follows.
        """
        context = generation.context
        answer, checkpoint = await self._submit(generation)
        watcher.notify(answer.cancel)
        with record_timings(answer, context):
            await answer.start()
        conversation = stored = None
        if turn is not None:
            try:
                conversation = await turn.begin(generation.answer_id, generation.model.name, after)
            except BaseException as error:
                answer.abandon(error)
                raise
            stored = turn.stored_answer()
        return self._run(
            generation,
            answer,
            checkpoint,
            stored.save if stored is not None else None,
            openai=openai,
            conversation=conversation,
            dropped=context.dropped_messages,
            stored=stored.reference.model_dump() if stored is not None else None,
        )

    async def start_response(self, generation: ChatGeneration, form: BackgroundFormat, saver: ResponseSaver) -> ChatRun:
        """Start a response in the background.

        Args:
            generation: The equivalent chat request, validated.
            form: The response without output.
            saver: Stores the response when it has ended.

        Raises:
            UnavailableError: The response cannot be stored.
        """
        answer, checkpoint = await self._submit(generation)
        background = BackgroundSaver(generation.context.caller.owner, form, saver)
        try:
            await background.announce()
        except BaseException as error:
            answer.abandon(error)
            raise
        return self._run(generation, answer, checkpoint, background.save, response=form)

    async def _submit(self, generation: ChatGeneration) -> tuple[Answer, AnswerCheckpoint | None]:
        """Submit an answer to its engine.

        Returns:
            The answer, and the checkpoint that records its tokens for other gateways, if there is
            one.
        """
        # The answer of another provider has text and no token ids, so it cannot be replayed.
        has_tokens = not isinstance(generation.model, ProviderModel)
        checkpoint = self._checkpoint(generation.answer_id, generation.context.caller) if has_tokens else None
        note = checkpoint.add if checkpoint is not None else None
        return await generation.start(whole=False, on_tokens=note), checkpoint

    def _run(
        self,
        generation: ChatGeneration,
        answer: Answer,
        checkpoint: AnswerCheckpoint | None,
        save: Callable[[ChatRun], Awaitable[bool]] | None,
        **own: Any,
    ) -> ChatRun:
        """Run a started answer in the background, and register it for other gateways.

        `own` are further fields of the answer's record.
        """
        chat, context, choice = generation.body, generation.context, answer.choices[0]
        record = AnswerRecord(
            caller=context.caller,
            model=generation.model.name,
            version=context.version,
            body=chat.model_dump(mode="json", exclude_unset=True, by_alias=True) if checkpoint is not None else {},
            created=int(time.time()),
            arrived=context.arrived,
            prompt_tokens=answer.prompt_tokens,
            max_tokens=choice.max_tokens,
            reserved_tokens=context.reservation.reserved_tokens if context.reservation is not None else 0,
            event_id=context.usage_recorder.event_id if context.usage_recorder is not None else "",
            **own,
        )
        # An answer with a filter that waits for a service is not registered, because the filter
        # could decide differently in a replay.
        if checkpoint is not None and not (choice.guard is not None and choice.guard.waits):
            checkpoint.register(record.model_dump_json().encode())
        form, background = record.form(generation.answer_id, chat, self.price), record.response is not None
        run = ChatRun(generation.answer_id, answer, form, context, save, checkpoint, background=background)
        self.runs.add(run)
        context.background_task = run.task
        return run

    def respond(self, run: Callable[[], Awaitable[ChatRun]], watcher: DisconnectWatcher) -> Response:
        """Return a response that streams the answer which `run` starts."""

        async def open_source() -> EventSource:
            reader = (await run()).read()
            watcher.notify(reader.cancel)
            return reader

        return EventStreamResponse(open_source, watcher, self._service.timeouts)

    async def collect(self, run: ChatRun, watcher: DisconnectWatcher) -> dict[str, Any]:
        """Return the whole answer of a request without a stream, as JSON.

        Raises:
            ApiError: The answer failed, or another gateway has taken it over.
        """
        watcher.notify(run.answer.cancel)
        run.enter()
        await run.task
        if run.failure is not None:
            raise run.failure
        if run.moved:
            raise UnavailableError(
                f"Another gateway continues this answer; read the rest from GET /api/chat/completions/{run.id}.",
                code="stream_moved",
            )
        assert isinstance(run.format, ResumableChunks)
        return run.format.complete(run)

    # -- clients that reconnect

    async def resume(self, request: Request) -> Response:
        """Send the events after the header `Last-Event-ID` to the owner of the answer."""
        run = await self._find(request)
        try:
            after = await last_event_number(request.headers.get("last-event-id"), run)
            watcher = DisconnectWatcher(request.receive)
            reader = run.read(after)
        finally:
            run.leave()
        watcher.notify(reader.cancel)

        async def open_source() -> EventSource:
            return reader

        return EventStreamResponse(open_source, watcher, self._service.timeouts)

    async def stop(self, request: Request) -> Response:
        """End an answer early, and store the part that was generated."""
        run = await self._find(request)
        try:
            await run.stop()
        finally:
            run.leave()
        return json_response({"id": run.id, "object": "chat.completion", "status": run.status, "saved": run.saved})

    async def _find(self, request: Request) -> AnswerRun:
        """Return an answer of the caller, with the request as its reader.

        Raises:
            NotFoundError: The id is malformed.
            GoneError: No gateway has the answer any longer.
        """
        run_id, owner = request.path_params["run_id"], context_of(request).caller.owner
        if not _RUN_ID.fullmatch(run_id):
            raise _no_answer(run_id)
        run = await self.find(run_id, owner)
        if run is None:
            raise GoneError(
                "This answer is not generated any longer: it ended more than a minute ago, or its gateway stopped. The "
                "part that was stored is in its conversation; otherwise send the request again.",
                code="stream_gone",
            )
        return run

    async def find(self, run_id: str, owner: str) -> AnswerRun | None:
        """Return an answer that runs or has just ended, or None if no gateway has it.

        The caller counts as a reader of the answer until it calls `leave`.

        Raises:
            UnavailableError: Redis cannot be reached.
        """
        run: AnswerRun | None = self.runs.find(run_id, owner)
        followed = None
        if run is None and self._checkpoints is not None:
            turn = self._turns.setdefault(owner, asyncio.Lock())
            async with turn:
                run = followed = await self._follow(run_id, owner)
        if run is None:
            return None
        run.enter()
        if followed is not None:
            try:
                await followed.caught_up.wait()
            except BaseException:
                followed.leave()
                raise
        return run

    async def _follow(self, run_id: str, owner: str) -> FollowedRun | None:
        """Return an answer of `owner` that another gateway generates, or None if there is none."""
        from llmops.gateway.conversations.followed_run import FollowedRun

        assert self._checkpoints is not None
        shared_id = shared_answer_id(owner, run_id)
        if shared_id in self._followed:
            return self._followed[shared_id]
        data = await self._checkpoints.record(shared_id)
        if data is None:
            return None
        try:
            record = AnswerRecord.decode(data)
            chat = record.request
        except MALFORMED:
            log.error("The answer %s is damaged in Redis, and cannot be read here.", run_id)
            return None
        model = self._model(record)
        generation = ChatGeneration(self._service, chat, model, run_id, record.context())
        run = self._followed[shared_id] = FollowedRun(
            run_id,
            owner,
            record.form(run_id, chat, self.price),
            await generation.replayed_choice(record.max_tokens),
            self._checkpoints,
            record.caller.share,
            on_idle=partial(self._followed.__delitem__, shared_id),
        )
        return run

    # -- answers of lost gateways

    def adopt(self, claimed: ClaimedAnswer) -> None:
        """Continue an answer that this gateway has taken over, and bill the whole answer.

        Raises:
            ValueError: The record of the answer is damaged; or another error of MALFORMED.
        """
        record = AnswerRecord.decode(claimed.record)
        self._adoptions.start(self._adopt(claimed, record, record.request), f"adopt-{claimed.id}")

    async def close(self) -> None:
        """Leave the answers in progress to other gateways, or store the parts generated so far."""
        await self._adoptions.cancel()
        await self.runs.close()

    async def _adopt(self, claimed: ClaimedAnswer, record: AnswerRecord, body: ChatRequest) -> None:
        from llmops.gateway.conversations.checkpoints import decode_batches

        run_id = claimed.id.rpartition(":")[2]
        assert self._checkpoints is not None
        checkpoint = self._checkpoints.checkpoint(claimed.id, len(claimed.tokens))
        checkpoint.register(b"")
        context = record.context()
        for check in self._checks:
            check.adopt(context)
        begun = BegunAnswer(
            list(decode_batches(claimed.tokens)), record.max_tokens, claimed.cached_tokens, record.event_id
        )
        try:
            if context.reservation is not None:
                # Quotas cannot stop the answer now, because it was admitted when it began. A
                # reservation without a bound has grown with its answer.
                known = max(record.reserved_tokens, record.prompt_tokens + len(begun.tokens))
                with suppress(ApiError):
                    await context.reservation.tokens(record.model, record.prompt_tokens, record.max_tokens, known=known)
            if claimed.times > MAX_TAKEOVERS:
                raise UnavailableError(
                    "The gateways that generated this answer were lost, one after the other. Ask the gateways' "
                    "operator for the cause."
                )
            run = await self._continue(run_id, record, body, begun, checkpoint, context)
            context.background_task = run.task
            await asyncio.shield(run.task)
        except Exception as error:
            if not isinstance(error, ApiError):
                log.exception(
                    "The answer %s of a lost gateway could not be continued because of an internal error; its client "
                    "receives an error.",
                    run_id,
                )
                error = InternalError("The answer could not be continued by another gateway; send the request again.")
            await self._give_up(error, run_id, record, begun, checkpoint, context)
        finally:
            for check in self._checks:
                check.after(context, Outcome(200, context.finish_reason, context.usage))

    async def _continue(
        self,
        run_id: str,
        record: AnswerRecord,
        body: ChatRequest,
        begun: BegunAnswer,
        checkpoint: AnswerCheckpoint,
        context: RequestContext,
    ) -> ChatRun:
        """Continue an answer that was taken over, and return its run.

        Attempts repeat for `ADOPTION_TIMEOUT`, because a gateway that has just started may not have
        found its models, and all slots may be in use.
        """
        deadline = asyncio.get_running_loop().time() + ADOPTION_TIMEOUT
        while True:
            deltas = AnswerLog()
            try:
                save = await self._saving(record)
                generation = ChatGeneration(self._service, body, self._model(record), run_id, context)
                replay = partial(replay_batches, batches=begun.batches, log=deltas)
                answer = await generation.continue_answer(begun, replay, checkpoint.add)
            except UnavailableError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                log.info(
                    "The answer %s of a lost gateway cannot be continued yet and is tried again: %s",
                    run_id,
                    error.full_message,
                )
                await asyncio.sleep(ADOPTION_INTERVAL)
                continue
            form, background = record.form(run_id, body, self.price), record.response is not None
            run = ChatRun(run_id, answer, form, context, save, checkpoint, deltas, background)
            self.runs.add(run)
            log.info("The answer %s of a lost gateway continues here after %d tokens.", run_id, len(begun.tokens))
            return run

    async def _saving(self, record: AnswerRecord) -> Callable[[ChatRun], Awaitable[bool]] | None:
        """Return the function that stores the answer, or None if the answer is not stored.

        An answer that has an end in the store keeps it: an older Redis was restored.
        """
        if record.response is not None:
            return await self._saving_response(record.caller, record.response)
        if record.stored is None:
            return None
        from llmops.gateway.conversations.conversation_turn import AnswerReference, StoredAnswer

        reference = AnswerReference.model_validate(record.stored)
        price = partial(self.price, record.arrived)
        stored = await StoredAnswer.find(await self._conversations(), record.caller, reference, price)
        if stored is None:
            return None
        return _keep_saved if stored.is_over else stored.save

    async def _saving_response(self, caller: Caller, form: BackgroundFormat) -> Callable[[ChatRun], Awaitable[bool]]:
        with suppress(UnavailableError):
            known = await self._responses.find(form.response["id"], caller.owner)
            if known is not None and not known.running:
                return _keep_saved
        add = None
        if form.response.get("conversation") is not None:
            from llmops.gateway.conversations.conversation_store import public_id
            from llmops.gateway.conversations.conversation_turn import ResponseTurn

            store = await self._conversations()
            with suppress(NotFoundError):
                conversation = await store.find(caller, form.response["conversation"]["id"])
                add = ResponseTurn(store, caller, public_id(conversation)).add
        saver = ResponseSaver(self._responses, add, caller.group)
        return BackgroundSaver(caller.owner, form, saver, taken_over=True).save

    async def _give_up(
        self,
        error: ApiError,
        run_id: str,
        record: AnswerRecord,
        begun: BegunAnswer,
        checkpoint: AnswerCheckpoint,
        context: RequestContext,
    ) -> None:
        """End an answer that cannot be continued, and bill the tokens generated so far."""
        log_detail(error)
        context.usage = Usage(record.prompt_tokens, len(begun.tokens), 0, begun.cached_tokens)
        context.finish_reason = error.finish_reason
        end = EndedAnswer(
            finish="error", usage=context.usage, saved=False, ended_at=int(time.time()), error=error.body()["error"]
        )
        if not await checkpoint.finish(end.encode()):
            context.usage = None
        elif context.usage_recorder is not None:
            context.usage_recorder.begin(
                record.model,
                run_id,
                record.prompt_tokens,
                event_id=record.event_id,
                known_tokens=len(begun.tokens),
            )
            context.usage_recorder.end(Outcome(error.status, error.finish_reason, context.usage))

    def _model(self, record: AnswerRecord) -> GenerativeModel:
        """Return the model of a record, in the version that began the answer.

        Raises:
            UnavailableError: The model or its version is not served, yet or any longer.
        """
        try:
            model = self._service.models.find(record.model)
        except ModelNotFoundError as error:
            raise UnavailableError(f"{record.model} is not served here now; try again.") from error
        if model.version == record.version or self._service.version_router is None:
            return model
        found = self._service.version_router.find(model, record.version)
        if found is None:
            raise UnavailableError(
                f"The version {record.version} of {record.model} is not served any longer; send the request again."
            )
        return found

    def _checkpoint(self, run_id: str, caller: Caller) -> AnswerCheckpoint | None:
        if self._checkpoints is None or not self._may_store(caller.tenant_id):
            return None
        return self._checkpoints.checkpoint(shared_answer_id(caller.owner, run_id))


def check_resumable(body: ChatRequest) -> None:
    """Reject a request whose answer cannot be replayed.

    Raises:
        UnsupportedError: The request asks for several answers or for log-probabilities.
    """
    if (body.n or 1) > 1:
        raise UnsupportedError("A stream that can be resumed has one answer; leave out n.", param="n")
    if body.logprobs:
        raise UnsupportedError("A stream that can be resumed has no logprobs; leave logprobs out.", param="logprobs")


async def _keep_saved(_run: ChatRun) -> bool:
    return True


def _no_answer(run_id: str) -> NotFoundError:
    return NotFoundError(f"There is no answer with id '{run_id[:40]}'; use the id in the answer's first event.")


class _ResumableChatChunks(ChatChunks):
    """The base of writers of chat chunks for answers whose log can be read again from any event."""

    def read(self, run: AnswerRun, after: int) -> AnswerReader:
        return AnswerReader(run, self, after)

    @abstractmethod
    def end(self, run: AnswerRun) -> bytes: ...


class ResumableChunks(_ResumableChatChunks):
    """A writer of the chunks of /api/chat/completions, which a client can resume.

    The first event names the place where the answer is stored. The last event has the usage and the
    cost.
    """

    def __init__(
        self,
        run_id: str,
        body: ChatRequest,
        model: str,
        created: int,
        conversation: dict[str, Any] | None,
        dropped: int,
        price: Callable[[str, Usage], int | None],
    ) -> None:
        # The last event always has the usage, whatever `stream_options` request.
        super().__init__(run_id, body.model_copy(update={"stream_options": None}), created, 1)
        self._id, self._model, self._served_by, self._created, self._price = run_id, body.model, model, created, price
        self._storage = {"conversation": conversation, "dropped_messages": dropped}

    def role(self, index: int) -> bytes:
        """Return the first chunk of the answer, which tells where the answer is stored."""
        return super().role(index).removesuffix(b"}\n\n") + b"," + json.dumps(self._storage).encode()[1:] + b"\n\n"

    def end(self, run: AnswerRun) -> bytes:
        """Return the last events: the finish reason, usage and cost, then `[DONE]`."""
        finish = json.dumps(_finish_reason(run))
        head = f'{self._openings[0]}}},"logprobs":null,"finish_reason":{finish}}}],'
        return (head + json.dumps(self._outcome(run))[1:] + "\n\n").encode() + DONE_EVENT

    def complete(self, run: AnswerRun) -> dict[str, Any]:
        """Return the whole answer, for a request without a stream."""
        pieces = run.log.pieces() or [ContentDelta("")]
        choice = {"index": 0, "message": message_of(pieces), "logprobs": None, "finish_reason": _finish_reason(run)}
        head = {"id": self._id, "object": "chat.completion", "created": self._created, "model": self._model}
        return {**head, "choices": [choice], **self._outcome(run), **self._storage}

    def _outcome(self, run: AnswerRun) -> dict[str, Any]:
        micros = self._price(self._served_by, run.usage)
        cost = None if micros is None else micros / 1e6
        outcome = {"served_by": self._served_by, "usage": usage_counts(run), "cost_usd": cost}
        return {**outcome, "status": run.status, "saved": run.saved}


class ResumableOpenAIChunks(_ResumableChatChunks):
    """A writer of OpenAI's chunks for a stream that a client can resume."""

    def __init__(self, run_id: str, body: ChatRequest, created: int) -> None:
        super().__init__(run_id, body, created, 1)

    def end(self, run: AnswerRun) -> bytes:
        """Return the last events, which are none after an error: the error ends the stream."""
        if run.error is not None:
            return b""
        reason = _finish_reason(run)
        last = b"" if reason is None else self.finish(0, reason)
        return last + self.last(run)


def _finish_reason(run: AnswerRun) -> str | None:
    """Return OpenAI's finish reason, or None for an answer that was stopped or failed."""
    return run.finish if run.finish in FINISH_REASONS else None
