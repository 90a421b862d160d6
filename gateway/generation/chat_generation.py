"""From a validated chat request to a started answer; chat completions, responses and messages all go this way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from llmops.gateway.errors import InvalidRequestError, UnsupportedError
from llmops.gateway.generation.answer import Answer
from llmops.gateway.generation.app_state import AppState, admit, open_streams
from llmops.gateway.generation.chat_messages import message_texts, render_chat
from llmops.gateway.generation.choice import Choice, LogprobBuffer, TokenOffsets
from llmops.gateway.generation.parsers.harmony import FINAL_CHANNEL, HarmonyParser, is_harmony
from llmops.gateway.generation.parsers.output_processor import OutputProcessor, ProcessorChain
from llmops.gateway.generation.parsers.reasoning import ReasoningParser, prompt_opens_reasoning, reasoning_markers
from llmops.gateway.generation.parsers.tool_plan import FirstCallOnly, ToolPlan, plan_tools
from llmops.gateway.generation.prompt_limits import check_message_limits, check_prompt_text, template_cost
from llmops.gateway.generation.sampling import (
    check_capabilities,
    check_guide,
    check_logprobs,
    resolve_max_tokens,
    resolve_sampling,
    resolve_stop_conditions,
    tokenize_bad_words,
)
from llmops.gateway.generation.structured.request_guide import (
    compile_guide,
    guide_cost,
    guide_field,
    parse_guide,
    requires_strict_guide,
)
from llmops.gateway.generation.structured.schema_validation import SchemaLimits
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import EngineRequest, Guide
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.schemas.chat_request import ChatRequest
from llmops.gateway.settings import RequestLimits
from llmops.gateway.telemetry.metrics import AnswerMeter
from llmops.gateway.text.text_thread_pool import THREAD_CHARACTERS


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A rendered and tokenised request. `processor` makes one per choice; None when all of its text is content.

    `marker_ids`: the thinking's markers that are one token, with the length of their text; None without thinking.
    """

    input_ids: list[int]
    guide: Guide | None
    processor: Callable[[], OutputProcessor] | None
    skip_special_tokens: bool
    bad_words: tuple[tuple[int, ...], ...] = ()
    marker_ids: Mapping[int, int] | None = None


def validate_chat(body: ChatRequest, model: GenerativeModel, limits: RequestLimits) -> None:
    """The checks that do not need the rendered prompt."""
    if body.functions or body.function_call:
        raise InvalidRequestError("functions are superseded; use tools and tool_choice.", param="functions")
    if body.audio or set(body.modalities or ["text"]) != {"text"}:
        raise InvalidRequestError(
            "Only text answers are supported; leave audio and modalities out.",
            param="audio" if body.audio else "modalities",
        )
    if body.prediction is not None:
        raise UnsupportedError("prediction is not supported: no engine here takes a draft text.", param="prediction")
    if body.web_search_options is not None:
        raise InvalidRequestError("web_search_options are not supported; leave them out.", param="web_search_options")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "stream_options need stream to be true; set it, or leave stream_options out.", param="stream_options"
        )
    check_message_limits(body.messages, limits)
    if len(body.tools or ()) > limits.tools:
        raise InvalidRequestError(
            f"The request has {len(body.tools or ())} tools; send at most {limits.tools}.", param="tools"
        )
    check_capabilities(body, model.card)
    top = body.top_logprobs or 0
    if top and not body.logprobs:
        raise InvalidRequestError("top_logprobs need logprobs to be true; set it.", param="top_logprobs")
    check_logprobs(bool(body.logprobs), top, model.card, "top_logprobs")


def start_chat(
    service: AppState,
    body: ChatRequest,
    model: GenerativeModel,
    answer_id: str,
    context: RequestContext,
    *,
    whole: bool,
    fit: bool = False,
) -> Awaitable[Answer]:
    """Submit the request. Raises InvalidRequestError, or UnavailableError when too many are waiting.

    `whole`: nothing is shown before its end. `fit`: a length for which the context has no room is cut to what there
    is, instead of refused.
    """
    start = partial(_submit_chat, service, body, model, answer_id, context, whole, fit)
    return admit(service, model, body.n or 1, context, start)


async def prepare_chat_in_thread(
    service: AppState, body: ChatRequest, model: GenerativeModel, context: RequestContext
) -> PreparedChat:
    """`prepare_chat` on a text thread, when it is the caller's turn."""
    # each message costs template time however short it is
    size = context.work_bytes + 64 * len(body.messages) + template_cost(model)
    size += (THREAD_CHARACTERS if body.tools else 0) + guide_cost(body)
    caller = context.caller.share
    return await service.text_threads.run(lambda: prepare_chat(model, body, service.limits, context.mark), size, caller)


async def _submit_chat(
    service: AppState,
    body: ChatRequest,
    model: GenerativeModel,
    answer_id: str,
    context: RequestContext,
    whole: bool,
    fit: bool,
    leave: Callable[[], None],
    meter: AnswerMeter,
) -> Answer:
    if service.safety is not None:
        await service.safety.check_prompt(message_texts(body.messages), context.caller)
    plan = await prepare_chat_in_thread(service, body, model, context)
    wanted, field = _requested_max_tokens(body)
    default = service.default_tokens
    length = resolve_max_tokens(wanted, len(plan.input_ids), model.card, default=default, param=field, fit=fit)
    if context.reservation is not None:
        n, bounded = body.n or 1, wanted is not None
        allowed = await context.reservation.tokens(model.name, len(plan.input_ids), n * length, n, bounded)
        length = allowed // n
    endings = resolve_stop_conditions(body, model.card, service.limits)
    request = EngineRequest(
        request_id=answer_id,
        input_ids=plan.input_ids,
        max_tokens=length,
        sampling=resolve_sampling(body, model.card),
        n=body.n or 1,
        min_tokens=body.min_tokens or 0,
        end_ids=endings.end_ids,
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs or 0,
        bad_words=plan.bad_words,
        guide=plan.guide,
        caller=context.caller.share,
        cache_salt=service.cache_salt(context.caller.share),
        extras=model.extras,
        turn=context.scheduling,
        whole=whole,
        trace=context.traceparent,
    )
    end_ids = frozenset(endings.end_ids)

    def choice(index: int) -> Choice:
        return Choice(
            index,
            model.tokenizer.detokenizer(skip_special_tokens=plan.skip_special_tokens),
            max_tokens=length,
            end_ids=end_ids,
            stops=endings.stops,
            processor=plan.processor() if plan.processor else None,
            logprobs=LogprobBuffer(model.tokenizer.token_bytes) if body.logprobs else None,
            starts=TokenOffsets(plan.marker_ids) if plan.marker_ids is not None else None,
            guard=service.safety.guard(context.caller) if service.safety is not None else None,
        )

    stream = await open_streams(model.engine, [request])
    context.mark("submit")
    meter.submitted(len(plan.input_ids), request.n)
    if context.usage_recorder is not None:
        context.usage_recorder.begin(model.name, answer_id, len(plan.input_ids))
    choices, fresh = [choice(index) for index in range(request.n)], choice if whole else None
    return Answer(stream, choices, meter, service.timeouts, len(plan.input_ids), leave, context, fresh)


def prepare_chat(
    model: GenerativeModel, body: ChatRequest, limits: RequestLimits, mark: Callable[[str], None]
) -> PreparedChat:
    """Prompt, grammar and processing; the template writes the special tokens itself. `mark` ends a stage."""
    mark("queue")
    schema_limits = SchemaLimits.of(limits)
    template = model.template.source if model.template else ""
    own_guide = parse_guide(body, schema_limits)
    tools = plan_tools(body.tools, body.tool_choice, body.parallel_tool_calls, template, own_guide, schema_limits)
    guide = _chat_guide(body, tools, own_guide, model)
    prompt = render_chat(model, body, tools.definitions)
    if tools.guide is not None and is_harmony(template) and model.template is not None:
        prompt = prompt.then(model.template.own(FINAL_CHANNEL))
    mark("template")
    check_prompt_text(prompt.text, model, "messages")
    input_ids = model.tokenizer.encode_prompt(prompt)
    mark("tokenise")
    reading = _output_parsing(tools, template, prompt.text)
    visible = (*tools.special_tokens, *reading.markers)
    return PreparedChat(
        input_ids=input_ids,
        guide=guide,
        processor=reading.processor,
        skip_special_tokens=body.skip_special_tokens is not False and not model.tokenizer.has_special(visible),
        bad_words=tokenize_bad_words(body, model.tokenizer, limits),
        marker_ids=_marker_ids(model, reading.markers) if reading.markers else None,
    )


def _chat_guide(body: ChatRequest, tools: ToolPlan, own_guide: Guide | None, model: GenerativeModel) -> Guide | None:
    """The engine's guide. A function that is not `strict` is held to its schema as far as a grammar can."""
    if tools.guide is None:
        return None
    field = guide_field(body) if tools.guide == own_guide else "tool_choice"
    check_guide(tools.guide, model.card, field)
    strict = (
        requires_strict_guide(body) if own_guide is not None else any(tool.function.strict for tool in body.tools or ())
    )
    named = field if tools.guide == own_guide else "tools"
    return compile_guide(tools.guide, model.card.capabilities.guided, strict, named)


class OutputParsing(NamedTuple):
    """How the text is read: its processor, and the markers around what is thinking."""

    processor: Callable[[], OutputProcessor] | None
    markers: tuple[str, ...] = ()


def _output_parsing(tools: ToolPlan, template: str, prompt: str) -> OutputParsing:
    """Thinking first, then calls. Under a grammar the answer starts at once, so there is no thinking to split off."""
    if tools.guide is not None:
        return OutputParsing(tools.processor)
    if is_harmony(template):
        harmony = (lambda: FirstCallOnly(HarmonyParser())) if tools.first_call_only else HarmonyParser
        return OutputParsing(harmony, HarmonyParser.special_tokens)
    markers = reasoning_markers(template)
    if markers is None:
        return OutputParsing(tools.processor)
    found, inside, second = markers, prompt_opens_reasoning(prompt, markers), tools.processor
    return OutputParsing(
        lambda: ProcessorChain([ReasoningParser(found, inside), *([second()] if second else [])]),
        (found.start, found.end),
    )


def _marker_ids(model: GenerativeModel, markers: Sequence[str]) -> dict[int, int]:
    found = ((model.tokenizer.token_id(text), len(text)) for text in markers)
    return {token: size for token, size in found if token is not None}


def _requested_max_tokens(body: ChatRequest) -> tuple[int | None, str]:
    if body.max_completion_tokens is not None:
        return body.max_completion_tokens, "max_completion_tokens"
    return body.max_tokens, "max_tokens"
