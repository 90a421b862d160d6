"""The start of an answer to a chat request, for chat completions, responses and messages."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from llmops.gateway.errors import InvalidRequestError, UnsupportedError
from llmops.gateway.generation.answer import Answer, TokenCallback
from llmops.gateway.generation.app_state import AppState, BegunAnswer, Generation
from llmops.gateway.generation.chat_messages import render_chat, request_texts
from llmops.gateway.generation.choice import Choice, TokenOffsets
from llmops.gateway.generation.parsers.harmony import FINAL_CHANNEL, HarmonyParser, is_harmony
from llmops.gateway.generation.parsers.output_processor import ContentDelta, OutputProcessor, ProcessorChain
from llmops.gateway.generation.parsers.reasoning import ReasoningParser, prompt_opens_reasoning, reasoning_markers
from llmops.gateway.generation.parsers.tool_plan import FirstCallOnly, ToolPlan, plan_tools
from llmops.gateway.generation.prompt_limits import check_message_limits, check_prompt_text
from llmops.gateway.generation.provider_chat import start_provider_chat
from llmops.gateway.generation.sampling import (
    check_capabilities,
    check_guide,
    check_logprobs,
    check_prompt_logprobs,
    resolve_max_tokens,
    resolve_sampling,
    resolve_stop_conditions,
    tokenize_bad_words,
)
from llmops.gateway.generation.structured.request_guide import (
    GUIDE_FIELDS,
    compile_guide,
    guide_field,
    parse_guide,
    requires_strict_guide,
)
from llmops.gateway.generation.structured.schema_validation import SchemaLimits
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import EngineRequest, Guide
from llmops.gateway.routing.providers import ProviderModel
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.schemas.chat_request import ChatRequest
from llmops.gateway.settings import RequestLimits
from llmops.gateway.text.text_thread_pool import THREAD_CHARACTERS


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A rendered and tokenized request.

    Attributes:
        prompt: The text of the prompt.
        input_ids: The tokens of the prompt.
        guide: The guide of the engine; None without a guide.
        processor: Makes the processor of one choice; None if all text is content.
        skip_special_tokens: True if special tokens are removed from the text.
        bad_words: Token sequences that the engine bans.
        marker_ids: The lengths of the thinking markers that are one token, in characters, by token
            id. None for a model without thinking.
    """

    prompt: str
    input_ids: list[int]
    guide: Guide | None
    processor: Callable[[], OutputProcessor] | None
    skip_special_tokens: bool
    bad_words: tuple[tuple[int, ...], ...] = ()
    marker_ids: Mapping[int, int] | None = None


def validate_chat(body: ChatRequest, model: GenerativeModel, limits: RequestLimits) -> None:
    """Raise InvalidRequestError for a chat request that cannot be served.

    Only properties that are known without the prompt are checked.
    """
    if body.functions or body.function_call:
        raise InvalidRequestError("functions are not supported; use tools and tool_choice instead.", param="functions")
    if body.audio or set(body.modalities or ["text"]) != {"text"}:
        raise InvalidRequestError(
            "Only text answers are supported; leave audio and modalities out.",
            param="audio" if body.audio else "modalities",
        )
    if body.prediction is not None:
        raise UnsupportedError(
            "prediction is not supported, because no engine here takes a draft text; leave it out.", param="prediction"
        )
    if body.web_search_options is not None:
        raise InvalidRequestError("web_search_options are not supported; leave them out.", param="web_search_options")
    check_message_limits(body.messages, limits)
    if len(body.tools or ()) > limits.tools:
        raise InvalidRequestError(
            f"The request has {len(body.tools or ())} tools; send at most {limits.tools}.", param="tools"
        )
    check_capabilities(body, model.card)
    top = body.top_logprobs or 0
    if top and not body.logprobs:
        raise InvalidRequestError("top_logprobs need log-probabilities; set logprobs to true.", param="top_logprobs")
    if body.logprobs:
        check_logprobs(top, model.card, "top_logprobs")


class ChatGeneration(Generation[ChatRequest]):
    """A chat request on its way to the engine or to a provider."""

    async def start(self, *, whole: bool, fit: bool = False, on_tokens: TokenCallback | None = None) -> Answer:
        """Submit the request and return its answer.

        Args:
            whole: True if the client sees nothing before the end.
            fit: True to shorten an answer that does not fit into the context window, instead of
                refusing the request.
            on_tokens: Called with the tokens of each batch.

        Raises:
            InvalidRequestError: The prompt or the tools cannot be used.
            UnavailableError: Too many requests are waiting.
        """
        state, body, context = self.state, self.body, self.context
        with self.admitted(body.n or 1):
            if isinstance(self.model, ProviderModel):
                return await start_provider_chat(self, self.model)
            prepared = await self.prepare()
            if body.prompt_logprobs is not None:
                check_prompt_logprobs(body.prompt_logprobs, len(prepared.input_ids), self.model.card)
            max_tokens = await self._reserve_max_tokens(len(prepared.input_ids), fit)
            if state.safety is not None:
                # Run the filters after the prompt was found to fit the context and the quota, which
                # bound the filters' work.
                await state.safety.check_prompt(
                    request_texts(body), context.caller, prepared.prompt, end_user=context.end_user
                )
            request = self._engine_request(prepared, max_tokens, whole)
            return await self.submit([request], partial(self._make_choice, prepared, max_tokens), on_tokens)

    async def continue_answer(
        self, begun: BegunAnswer, replay: Callable[[Choice], Awaitable[None]], on_tokens: TokenCallback
    ) -> Answer:
        """Return the rest of an answer that a lost gateway began.

        The context must have the caller of the first request.

        Args:
            begun: The known part of the answer.
            replay: Feeds the known tokens to an empty choice.
            on_tokens: Called with the tokens of each batch.

        Raises:
            ApiError: The answer cannot be started; see `start`.
        """
        with self.admitted(1):
            prepared = await self.prepare()
            choice = self._make_choice(prepared, begun.max_tokens, 0)
            await replay(choice)
            return self.resume(self._engine_request(prepared, begun.max_tokens, False), choice, begun, on_tokens)

    async def replayed_choice(self, max_tokens: int) -> Choice:
        """Return an empty choice that turns tokens of this answer into text.

        Another gateway generates the tokens.

        Args:
            max_tokens: The maximum number of tokens of the answer.

        Raises:
            ApiError: The request cannot be prepared.
        """
        return self._make_choice(await self.prepare(), max_tokens, 0)

    async def prepare(self) -> PreparedChat:
        """Run `prepare_chat` on a text thread, where callers take turns."""
        state, body, model, context = self.state, self.body, self.model, self.context
        # Each message costs rendering time, however short it is.
        size = context.work_bytes + 64 * len(body.messages)
        is_slow = model.template is not None and model.template.is_slow
        if is_slow or body.tools or not GUIDE_FIELDS.isdisjoint(body.model_fields_set):
            size += THREAD_CHARACTERS
        prepare = partial(prepare_chat, model, body, state.limits, context.mark)
        return await state.text_threads.run(prepare, size, context.caller.share)

    def _engine_request(self, prepared: PreparedChat, max_tokens: int, whole: bool) -> EngineRequest:
        state, body, model, context = self.state, self.body, self.model, self.context
        return EngineRequest(
            request_id=self.answer_id,
            input_ids=prepared.input_ids,
            max_tokens=max_tokens,
            sampling=resolve_sampling(body, model.card),
            n=body.n or 1,
            min_tokens=body.min_tokens or 0,
            end_ids=resolve_stop_conditions(body, model.card, state.limits).end_ids,
            logprobs=bool(body.logprobs),
            top_logprobs=body.top_logprobs or 0,
            prompt_logprobs=body.prompt_logprobs,
            bad_words=prepared.bad_words,
            guide=prepared.guide,
            caller=context.caller.share,
            cache_salt=state.cache_salt(context.caller.share),
            cache_key=context.prompt_cache_key,
            extras=model.extras,
            turn=context.scheduling,
            whole=whole,
            trace=context.traceparent,
        )

    def _make_choice(self, prepared: PreparedChat, max_tokens: int, index: int) -> Choice:
        state, body, model, context = self.state, self.body, self.model, self.context
        processor = prepared.processor() if prepared.processor else None
        if processor is not None:
            processor.name_calls(f"{self.answer_id}/{index}")
        stop_conditions = resolve_stop_conditions(body, model.card, state.limits)
        before = prepared.prompt if body.continue_final_message else ""
        return Choice(
            index,
            model.tokenizer.detokenizers.make(prepared.skip_special_tokens),
            max_tokens=max_tokens,
            end_ids=frozenset(stop_conditions.end_ids),
            stops=stop_conditions.stops,
            processor=processor,
            logprobs=self.logprob_buffer(body.n or 1) if body.logprobs else None,
            starts=TokenOffsets(prepared.marker_ids) if prepared.marker_ids is not None else None,
            guard=state.safety.guard(context.caller, before, context.end_user) if state.safety is not None else None,
        )

    async def _reserve_max_tokens(self, prompt_tokens: int, fit: bool) -> int:
        """Return the maximum number of tokens of each choice, and reserve them.

        The maximum is the highest that the request, the context window and the caller's quota
        allow. If `fit` is True, an answer that does not fit into the context window is shortened.

        Raises:
            ContextLengthError: The answer does not fit, and `fit` is False.
        """
        body, model, context = self.body, self.model, self.context
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        requested: int | None = getattr(body, field)
        max_tokens = resolve_max_tokens(
            requested, prompt_tokens, model.card, default=self.state.default_tokens, param=field, fit=fit
        )
        if context.degraded is not None:
            max_tokens = self.limit_degraded(context.degraded, prompt_tokens, max_tokens)
        if context.reservation is None:
            return max_tokens
        n, is_bounded = body.n or 1, requested is not None
        return await context.reservation.tokens(model.name, prompt_tokens, n * max_tokens, n, is_bounded) // n


async def answer_message(state: AppState, name: str, message: str, max_tokens: int, context: RequestContext) -> str:
    """Return the most likely answer of a model to one message, for requests that the gateway makes.

    Args:
        state: The gateway's state.
        name: The name of the model.
        message: The user's message.
        max_tokens: The maximum number of tokens of the answer.
        context: A context for this request only.

    Raises:
        ApiError: The model is not served, or fails.
    """
    fields = {"messages": [{"role": "user", "content": message}], "max_completion_tokens": max_tokens}
    body = ChatRequest.model_validate({"model": name, "temperature": 0, **fields})
    chat = ChatGeneration(state, body, state.models.find(name), f"chatcmpl-{secrets.token_hex(12)}", context)
    answer = await chat.start(whole=True, fit=True)
    with closing(answer):
        await answer.start()
        parts = []
        while (delta := await answer.next()) is not None:
            pieces = delta.choice.sort(delta.text)
            parts += [piece.text for piece in pieces if isinstance(piece, ContentDelta)]
    return "".join(parts)


def prepare_chat(
    model: GenerativeModel, body: ChatRequest, limits: RequestLimits, mark: Callable[[str], None]
) -> PreparedChat:
    """Render and tokenize a request, compile its guide and plan its parsing.

    Args:
        model: The model that answers.
        body: The request.
        limits: The gateway's limits on requests.
        mark: Called with the name of each stage of the timeline when the stage ends.
    """
    mark("queue")
    template = model.template.source if model.template else ""
    tools, guide = ToolPlan(), None
    if body.tools or body.tool_choice or not GUIDE_FIELDS.isdisjoint(body.model_fields_set):
        schema_limits = SchemaLimits.of(limits)
        own_guide = parse_guide(body, schema_limits)
        tools = plan_tools(body.tools, body.tool_choice, body.parallel_tool_calls, template, own_guide, schema_limits)
        if tools.guide is not None:
            guide = _chat_guide(body, tools.guide, own_guide, model)
    prompt = render_chat(model, body, tools.definitions)
    if tools.guide is not None and is_harmony(template) and model.template is not None:
        prompt = prompt.then(model.template.own(FINAL_CHANNEL))
    mark("template")
    check_prompt_text(prompt.text, model, "messages")
    input_ids = model.tokenizer.encode_prompt(prompt)
    mark("tokenise")
    parsing = _output_parsing(tools, template, prompt.text)
    visible = (*tools.special_tokens, *parsing.markers)
    return PreparedChat(
        prompt=prompt.text,
        input_ids=input_ids,
        guide=guide,
        processor=parsing.processor,
        skip_special_tokens=body.skip_special_tokens is not False
        and not any(map(model.tokenizer.detokenizers.is_special, visible)),
        bad_words=tokenize_bad_words(body.bad_words, model.tokenizer, limits) if body.bad_words else (),
        marker_ids=_marker_ids(model, parsing.markers) if parsing.markers else None,
    )


def _chat_guide(body: ChatRequest, guide: Guide, own_guide: Guide | None, model: GenerativeModel) -> Guide:
    """Return `guide` in a form that the engine accepts.

    Schemas of functions that are not `strict` are enforced as far as a grammar can.

    Args:
        body: The request.
        guide: The guide of the request's tools and its `response_format`.
        own_guide: The guide of the `response_format` alone.
        model: The model.
    """
    field = guide_field(body) if guide == own_guide else "tool_choice"
    check_guide(guide, model.card, field, body)
    strict = (
        requires_strict_guide(body) if own_guide is not None else any(tool.function.strict for tool in body.tools or ())
    )
    named = field if guide == own_guide else "tools"
    return compile_guide(guide, model.card.capabilities.guided, strict, named)


class OutputParsing(NamedTuple):
    """The parsing of a choice's text.

    Attributes:
        processor: Makes the processor of the text; None if all text is content.
        markers: The markers around thinking.
    """

    processor: Callable[[], OutputProcessor] | None
    markers: tuple[str, ...] = ()


def _output_parsing(tools: ToolPlan, template: str, prompt: str) -> OutputParsing:
    """Return how a choice's text is split into content, thinking and tool calls.

    An answer that follows a grammar starts at once, without thinking.
    """
    if tools.guide is not None:
        return OutputParsing(tools.processor)
    if is_harmony(template):
        harmony = (lambda: FirstCallOnly([HarmonyParser()])) if tools.first_call_only else HarmonyParser
        return OutputParsing(harmony, HarmonyParser.special_tokens)
    markers = reasoning_markers(template)
    if markers is None:
        return OutputParsing(tools.processor)
    inside, tool_processor = prompt_opens_reasoning(prompt, markers), tools.processor
    return OutputParsing(
        lambda: ProcessorChain([ReasoningParser(markers, inside), *([tool_processor()] if tool_processor else [])]),
        (markers.start, markers.end),
    )


def _marker_ids(model: GenerativeModel, markers: Sequence[str]) -> dict[int, int]:
    found = ((model.tokenizer.token_id(text), len(text)) for text in markers)
    return {token: size for token, size in found if token is not None}
