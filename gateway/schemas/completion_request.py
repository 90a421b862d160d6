"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from llmops.gateway.schemas.request_fields import SamplingFields, TokenId


class CompletionRequest(SamplingFields):
    """A text completion request; `prompt` is text or token ids, one or several of them."""

    model: str
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(default=None, description="16 when absent.")
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="0: of the chosen tokens only."
    )
    echo: bool | None = Field(default=None, description="The prompt before each text; not with logprobs.")
    best_of: Annotated[int, Field(ge=1, le=128)] | None = Field(
        default=None, description="Generate so many and give the n most likely ones."
    )
    suffix: str | None = Field(default=None, description="Refused.")
    add_special_tokens: bool | None = None
