"""The endpoints POST /tokenize and /detokenize, in vLLM's format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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
)
from llmops.gateway.http.middleware import GatewayApp
from llmops.gateway.http.request_context import RequestContext, context_of
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.schemas.chat_request import ChatRequest, RequestMessage, Tool
from llmops.gateway.schemas.request_fields import RequestModel, TokenId
from llmops.gateway.schemas.response_schemas import DetokenizeResponse, TokenizeResponse
from llmops.gateway.text.text_thread_pool import THREAD_CHARACTERS

#: Number of entries of an array that are encoded at a time, which takes about a millisecond.
TOKENS_PER_TURN = 8192


class TokenizeRequest(RequestModel):
    """A request to tokenize a prompt, or messages that are rendered with the chat template."""

    model: str
    prompt: str | None = None
    messages: Annotated[list[RequestMessage], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = Field(
        default=None, description="By default true for a prompt and false for messages."
    )
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    """A request to turn token ids into text, including special tokens."""

    model: str
    tokens: list[TokenId]


class TokenizeEndpoints:
    """The endpoints of tokenization, which do their work in text threads."""

    def __init__(self, service: AppState) -> None:
        self._service = service

    def add_routes(self, app: GatewayApp) -> None:
        """Add the routes to `app`."""
        app.add_endpoint(
            "POST",
            "/tokenize",
            self.tokenize,
            "Turn a prompt into token ids",
            TokenizeResponse,
            body=TokenizeRequest,
            tag="tokens",
        )
        app.add_endpoint(
            "POST",
            "/detokenize",
            self.detokenize,
            "Turn token ids into text",
            DetokenizeResponse,
            body=DetokenizeRequest,
            tag="tokens",
        )

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a prompt or of rendered messages."""
        context = context_of(request)
        body = await self._service.intake.load(TokenizeRequest, request)
        model = self._service.models.get(body.model, context.caller)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("Send either prompt or messages, and not both.", param="prompt")
        limits = self._service.limits
        check_prompt_characters(len(body.prompt or ""), limits, "prompt")
        check_message_limits(body.messages or (), limits)
        is_slow = model.template is not None and model.template.is_slow
        cost = THREAD_CHARACTERS if is_slow else 0
        return await self._respond(context, model, lambda: self._tokens(model, body), cost)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        context = context_of(request)
        body = await self._service.intake.load(DetokenizeRequest, request)
        model = self._service.models.get(body.model, context.caller)
        return await self._respond(context, model, lambda: self._text(model, body.tokens))

    async def _respond(
        self, context: RequestContext, model: GenerativeModel, work: Callable[[], bytes], cost: int = 0
    ) -> Response:
        await context.count_request(model.name)
        json_text = await self._service.text_threads.run(work, context.work_bytes + cost, context.caller.share)
        return Response(json_text, media_type="application/json")

    def _tokens(self, model: GenerativeModel, body: TokenizeRequest) -> bytes:
        ids = self._encode(model, body)
        head = {"count": len(ids), "max_model_len": model.card.max_seq_len}
        strings = _array([model.tokenizer.token(one) for one in ids]) if body.return_token_strs else b"null"
        return b"".join([json_bytes(head)[:-1], b',"tokens":', _array(ids), b',"token_strs":', strings, b"}"])

    def _text(self, model: GenerativeModel, ids: list[int]) -> bytes:
        if max(ids, default=0) >= model.card.vocab_size:
            raise InvalidRequestError(
                f"There is no token {max(ids)}: ids are below {model.card.vocab_size}.", param="tokens"
            )
        # A token can have thousands of characters, so a short body can become a long text.
        characters = sum(count * len(model.tokenizer.token(one) or "") for one, count in Counter(ids).items())
        check_prompt_characters(characters, self._service.limits, "tokens")
        return json_bytes({"prompt": model.tokenizer.decode(ids, skip_special_tokens=False)})

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


def _array(items: Sequence[Any]) -> bytes:
    """Return a JSON array, encoded in pieces.

    Encoding holds the interpreter lock, which the event loop gets between two pieces.
    """
    pieces = (json_bytes(items[at : at + TOKENS_PER_TURN])[1:-1] for at in range(0, len(items), TOKENS_PER_TURN))
    return b"[" + b",".join(pieces) + b"]"
