"""The body of POST /v1/moderations."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from llmops.gateway.schemas.request_fields import RequestModel


class ModerationRequest(RequestModel):
    """Text to be judged by the gateway's safety filters; `model` is accepted and changes nothing."""

    input: str | Annotated[list[str | dict[str, Any]], Field(min_length=1, max_length=64)]
    model: str | None = None
