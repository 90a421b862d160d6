"""Reading and validating request bodies: what they may weigh and hold, pydantic's errors as OpenAI's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, ErrorDetails
from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from llmops.gateway.errors import (
    BodyTooLargeError,
    CancelledStreamError,
    InvalidRequestError,
    RequestTimeoutError,
    missing_parameter,
)
from llmops.gateway.http.json_limits import check_json_size, reject_non_finite_numbers
from llmops.gateway.http.request_context import RequestContext, context_of
from llmops.gateway.settings import RequestLimits
from llmops.validation_errors import explain_first_error

_TIMED_OUT = "the body is late"

M = TypeVar("M", bound=BaseModel)

# A body that comes slower than this after its first seconds (`timeouts.body`) holds a connection for nothing; one that
# needs more than so many times `timeouts.body` altogether does so however fast it began.
MIN_BODY_BYTES_PER_SECOND, MAX_BODY_TIMEOUT_FACTOR = 1024, 10


def _stop_at_first_error(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple"):
            schema["fail_fast"] = True
        for inner in schema.values():
            _stop_at_first_error(inner)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            _stop_at_first_error(inner)


class FailFastModel(BaseModel):
    """Base of everything that comes with a request. A list ends at its first wrong item: one error, not millions."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_at_first_error(schema)
        return schema


@dataclass(slots=True)
class BodyReader:
    """Where all bodies of one gateway worker come in.

    `patience`: seconds a body has for each of its parts, and in which it may come at less than the least rate. `hold`
    hears of each part before it is kept, and may refuse it.
    """

    limits: RequestLimits
    patience: float
    hold: Callable[[int, RequestContext], None]

    async def load(self, model: type[M], request: Request) -> M:
        """The request's body as a `model`. Raises ApiError saying what is wrong with it, or with the moment."""
        context = context_of(request)
        self._check_announced(context)
        body = await self._read(request, context)
        context.size = len(body)
        suspect = await check_json_size(body, self.limits.json_values, self.limits.prompt_bytes)
        value = await parse_body(model, body)
        if suspect:
            await reject_non_finite_numbers(body)
        return value

    def _check_announced(self, context: RequestContext) -> None:
        limit = self.limits.body_bytes
        announced = context.given.get(b"content-length", b"0")
        if announced.isdigit() and (len(announced) > 18 or int(announced) > limit):
            raise _too_large(limit)

    async def _read(self, request: Request, context: RequestContext) -> bytes:
        parts: list[bytes] = []
        size, more, started, limit = 0, True, monotonic(), self.limits.body_bytes
        while more:
            if is_body_complete(request):
                part, more = await _receive_chunk(request)
            else:
                part, more = await self._awaited(request, size, monotonic() - started)
            size += len(part)
            self.hold(len(part), context)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
        return b"".join(parts)

    async def _awaited(self, request: Request, size: int, passed: float) -> tuple[bytes, bool]:
        """What comes after `size` bytes and `passed` seconds."""
        try:
            return await _receive_chunk_within(self._left(passed, size), request)
        except TimeoutError:
            raise RequestTimeoutError(f"The body came too slowly: {size} bytes so far.") from None

    def _left(self, passed: float, size: int) -> float:
        """Seconds in which more has to come: what came fast must not buy hours of silence."""
        slowest = self.patience + size / MIN_BODY_BYTES_PER_SECOND
        return min(self.patience, min(slowest, MAX_BODY_TIMEOUT_FACTOR * self.patience) - passed)


async def _receive_chunk_within(seconds: float, request: Request) -> tuple[bytes, bool]:
    """Raises TimeoutError. A task for each part, as wait_for makes one, would cost more than reading it."""
    task = asyncio.current_task()
    assert task is not None
    if seconds <= 0:
        raise TimeoutError
    timer = asyncio.get_running_loop().call_later(seconds, task.cancel, _TIMED_OUT)
    try:
        return await _receive_chunk(request)
    except asyncio.CancelledError as error:
        if error.args != (_TIMED_OUT,):
            raise
        task.uncancel()
        raise TimeoutError from None
    finally:
        timer.cancel()


def is_body_complete(request: Request) -> bool:
    """Whether all of the body has come, so that reading it does not wait; that of most requests has."""
    cycle = getattr(request.receive, "__self__", None)
    return isinstance(cycle, RequestResponseCycle) and not cycle.more_body


async def _receive_chunk(request: Request) -> tuple[bytes, bool]:
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise CancelledStreamError
    return message.get("body", b""), bool(message.get("more_body"))


async def parse_body(model: type[M], body: bytes) -> M:
    """Validate JSON against `model`. Raises InvalidRequestError with `param` as in `messages[0].content`."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        # what is wrong is found by parsing it once more
        await asyncio.sleep(0)
        raise _explain_validation_error(error, body) from error


def validate_body(model: type[M], value: dict[str, Any]) -> M:
    """The same for what was parsed already."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _describe_first_error(error.errors(include_url=False, include_input=False), value) from error


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The body is larger than this gateway accepts ({limit} bytes).")


def _not_json(problem: str) -> str:
    return f"The body is not valid JSON: {problem}. Send a JSON object, with names and texts in double quotes."


def _explain_validation_error(error: ValidationError, body: bytes) -> InvalidRequestError:
    errors = error.errors(include_url=False, include_input=False)
    if errors[0]["type"] == "json_invalid":
        return InvalidRequestError(_not_json(errors[0]["msg"].removeprefix("Invalid JSON: ")))
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as wrong:
        return InvalidRequestError(_not_json(str(wrong)))
    if not isinstance(value, dict):
        return InvalidRequestError('The body is not a JSON object; send one, such as {"model": "NAME"}.')
    return _describe_first_error(errors, value)


def _describe_first_error(errors: list[ErrorDetails], value: dict[str, Any]) -> InvalidRequestError:
    # a value that fits no branch of a union has one error per branch: the one that got furthest tells most
    field = [one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]]
    first = max(field, key=lambda one: len(_field_path(one, value)))
    param = "".join(_field_path(first, value)).lstrip(".") or None
    if first["type"] == "missing":
        return missing_parameter(param or "")
    clause = explain_first_error([first, *(one for one in field if one["loc"] == first["loc"])])[1]
    return InvalidRequestError(f"Invalid value for '{param}': {clause}.", param=param, code=_error_code(first["type"]))


def _error_code(kind: str) -> str:
    return "invalid_type" if kind.endswith("_type") else "invalid_value"


def _field_path(error: ErrorDetails, value: Any) -> list[str]:
    """Pydantic names the branches of unions in its locations; only what is in the body, or missing there, is kept."""
    path = []
    absent = error["loc"][-1] if error["type"] == "missing" else None
    for part in error["loc"]:
        if isinstance(part, int) and isinstance(value, list) and part < len(value):
            path.append(f"[{part}]")
            value = value[part]
        elif isinstance(part, str) and isinstance(value, dict) and (part in value or part == absent):
            path.append(f".{part}")
            value = value.get(part)
    return path
