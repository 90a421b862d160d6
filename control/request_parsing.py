"""What comes with a request, within bounds: queries, and bodies of a few fields."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from llmops.gateway.errors import BodyTooLargeError, InvalidRequestError, RequestTimeoutError

MAX_BODY_BYTES = 64 * 2**10
BODY_TIMEOUT = 30.0


async def read_json_object(request: Request) -> dict[str, Any]:
    """The fields of a JSON object. Raises ApiError for what is none, is too large or does not come."""
    try:
        body = await asyncio.wait_for(_read(request), BODY_TIMEOUT)
    except TimeoutError:
        raise RequestTimeoutError("The body came too slowly.") from None
    try:
        fields = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            "The body is not valid JSON; send a JSON object, with names and texts in double quotes."
        ) from error
    if not isinstance(fields, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    return fields


def parse_query(request: Request, model: type[BaseModel]) -> dict[str, Any]:
    """By the names that `model` knows; lists as `by=day&by=model`, or with the brackets that some clients add."""
    lists = {field for field in model.model_fields if _is_list(model, field)}
    found: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        plain = name.removesuffix("[]")
        if plain in lists:
            found.setdefault(plain, []).append(value)
        else:
            found[name] = value
    return found


async def _read(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLargeError(f"The body is larger than is read here ({MAX_BODY_BYTES} bytes).")
    return bytes(body)


def _is_list(model: type[BaseModel], field: str) -> bool:
    return "tuple" in str(model.model_fields[field].annotation)


def json_response(data: Any, status: int = 200) -> Response:
    return Response(json.dumps(data, ensure_ascii=False), status, media_type="application/json")
