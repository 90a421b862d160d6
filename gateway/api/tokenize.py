"""POST /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.api.generation_response import json_bytes
from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.generation.chat_messages import render_chat
from llmops.gateway.generation.prompt_limits import (
    check_message_limits,
    check_prompt_characters,
    check_prompt_text,
    template_cost,
)
from llmops.gateway.http.request_context import context_of
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.schemas.chat_request import ChatRequest, RequestMessage, Tool
from llmops.gateway.schemas.request_fields import RequestModel, TokenId

TOKENS_PER_TURN = 8192


class TokenizeRequest(RequestModel):
    """Either `prompt` or `messages`; the latter go through the chat template."""

    model: str
    prompt: str | None = None
    messages: Annotated[list[RequestMessage], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = Field(default=None, description="True for a prompt, false for messages.")
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    """Token ids to text, special tokens included."""

    model: str
    tokens: list[TokenId]


def _listed(items: Iterable[Any]) -> Iterator[str]:
    """A JSON array in pieces: encoding holds the interpreter's lock, so others get it between two of them."""
    rest, opening = iter(items), "["
    while piece := list(itertools.islice(rest, TOKENS_PER_TURN)):
        yield opening + json.dumps(piece, ensure_ascii=False)[1:-1]
        opening = ", "
    yield "[]" if opening == "[" else "]"


def _text(model: GenerativeModel, ids: list[int]) -> bytes:
    if max(ids, default=0) >= model.card.vocab_size:
        raise InvalidRequestError(
            f"There is no token {max(ids)}: the vocabulary has {model.card.vocab_size}.", param="tokens"
        )
    return json_bytes({"prompt": model.tokenizer.decode(ids, skip_special_tokens=False)})


class TokenizeEndpoints:
    """The endpoints."""

    def __init__(self, service: AppState) -> None:
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        context = context_of(request)
        body = await self._service.intake.load(TokenizeRequest, request)
        model = self._service.models.get(body.model, context.caller)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("Give either prompt or messages.", param="prompt")
        limits = self._service.limits
        check_prompt_characters(len(body.prompt or ""), limits, "prompt")
        check_message_limits(body.messages or (), limits)
        size = context.size + template_cost(model)
        answer = await self._service.text_threads.run(lambda: self._tokens(model, body), size, context.caller.share)
        return Response(answer, media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        context = context_of(request)
        body = await self._service.intake.load(DetokenizeRequest, request)
        model = self._service.models.get(body.model, context.caller)
        answer = await self._service.text_threads.run(
            lambda: _text(model, body.tokens), context.size, context.caller.share
        )
        return Response(answer, media_type="application/json")

    def _tokens(self, model: GenerativeModel, body: TokenizeRequest) -> bytes:
        ids = self._encode(model, body)
        head = {"count": len(ids), "max_model_len": model.card.max_seq_len}
        strings = _listed(map(model.tokenizer.token, ids)) if body.return_token_strs else ["null"]
        parts = [json.dumps(head)[:-1], ', "tokens": ', *_listed(ids), ', "token_strs": ', *strings, "}"]
        return "".join(parts).encode("utf-8", "replace")

    def _encode(self, model: GenerativeModel, body: TokenizeRequest) -> list[int]:
        special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
        if body.messages is None:
            check_prompt_text(body.prompt or "", model, "prompt")
            return model.tokenizer.encode(body.prompt or "", add_special_tokens=special)
        fields = {name: getattr(body, name) for name in ("model", "messages", "tools", "chat_template_kwargs")}
        chat = ChatRequest.model_construct(**fields, add_generation_prompt=body.add_generation_prompt)
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None
        prompt = render_chat(model, chat, tools)
        check_prompt_text(prompt.text, model, "messages")
        return model.tokenizer.encode_prompt(prompt, add_special_tokens=special)
