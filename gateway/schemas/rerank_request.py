"""The body of POST /v1/rerank: Cohere's and Jina's fields, and vLLM's extras."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from llmops.gateway.schemas.request_fields import RequestModel


class RerankDocument(RequestModel):
    """A document as an object; other fields than its text do not count."""

    text: str


class RerankRequest(RequestModel):
    """Which of `documents` have most to do with `query`."""

    model: str
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | RerankDocument], Field(min_length=1)]
    top_n: Annotated[int, Field(ge=1)] | None = Field(default=None, description="Only so many results; all if absent.")
    return_documents: bool | None = Field(default=None, description="Results have the documents' texts, too.")
    truncation: bool | None = Field(
        default=None, description="Documents that are too long are cut; false: refused. True when absent."
    )
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Documents are cut to this many tokens, special tokens not counted."
    )
    rank_fields: list[str] | None = Field(default=None, description="Cohere's v1; nothing but `text` can be ranked.")
    max_chunks_per_doc: int | None = None
    priority: int | None = None
    user: str | None = None
