"""POST /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.http.body import parse, read_body
from llmops.gateway.openai.endpoints.common import json_response
from llmops.gateway.openai.prompt import render_chat
from llmops.gateway.openai.service import Service
from llmops.gateway.openai.types.chat import ChatRequest, Message, Tool
from llmops.gateway.openai.types.common import TokenId, Wire
from llmops.gateway.serving import ServedModel


class TokenizeRequest(Wire):
    """Either `prompt` or `messages`; the latter go through the chat template."""

    model: str
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = Field(default=None, description="True for a prompt, false for messages.")
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Wire):
    """Token ids to text, special tokens included."""

    model: str
    tokens: list[TokenId]


class Tokens:
    """The endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        body = parse(TokenizeRequest, await read_body(request, self._service.limits.body_bytes))
        model = self._service.models.get(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("Give either prompt or messages.", param="prompt")
        size = len(body.prompt or "") + sum(64 + len(str(message.content)) for message in body.messages or ())
        ids = await self._service.workers.run(lambda: self._encode(model, body), size)
        return json_response(
            {
                "count": len(ids),
                "max_model_len": model.card.max_seq_len,
                "tokens": ids,
                "token_strs": [model.tokenizer.token(i) for i in ids] if body.return_token_strs else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        body = parse(DetokenizeRequest, await read_body(request, self._service.limits.body_bytes))
        model = self._service.models.get(body.model)
        if max(body.tokens, default=0) >= model.card.vocab_size:
            raise InvalidRequestError(
                f"There is no token {max(body.tokens)}: the vocabulary has {model.card.vocab_size}.", param="tokens"
            )
        decode = lambda: model.tokenizer.decode(body.tokens, skip_special_tokens=False)  # noqa: E731
        return json_response({"prompt": await self._service.workers.run(decode, 4 * len(body.tokens))})

    def _encode(self, model: ServedModel, body: TokenizeRequest) -> list[int]:
        if body.messages is None:
            text = body.prompt or ""
        else:
            fields = {name: getattr(body, name) for name in ("model", "messages", "tools", "chat_template_kwargs")}
            chat = ChatRequest.model_construct(**fields, add_generation_prompt=body.add_generation_prompt)
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None
            text = render_chat(model, chat, tools)
        special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
        return model.tokenizer.encode(text, add_special_tokens=special)
