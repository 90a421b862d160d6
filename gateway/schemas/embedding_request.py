"""The body of POST /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from llmops.gateway.schemas.request_fields import RequestModel, TokenId


class EmbeddingRequest(RequestModel):
    """`input` is text or token ids, one or several of them."""

    model: str
    input: str | list[str] | list[TokenId] | list[list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = Field(default=None, description="float when absent.")
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Cut the vector to its first numbers and scale it to length 1 again."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        default=None, description="Cut longer texts to this many tokens (-1: the model's limit) instead of refusing."
    )
    user: str | None = None
    metadata: dict[str, Any] | None = None
