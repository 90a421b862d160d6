"""Reading and validation of request bodies.

The size, time and JSON cost of a body are bounded. Errors of pydantic are reported in OpenAI's
format.

Parsing JSON holds the interpreter lock, so a thread would not help against a body that is expensive
to parse. The cost is estimated from the bytes instead: a body over the limit is rejected before it
is parsed, and any other body takes tens of milliseconds at most. Bytes are examined in slices, and
other requests run between two slices. Expensive bodies are examined, parsed and converted one after
another, and other requests run between two bodies.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from time import monotonic
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, ErrorDetails
from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from llmops.gateway.errors import (
    BodyTooLargeError,
    CancelledStreamError,
    ContextLengthError,
    InvalidRequestError,
    RequestTimeoutError,
    missing_parameter,
)
from llmops.gateway.http.request_context import RequestContext, context_of
from llmops.gateway.settings import RequestLimits
from llmops.validation_errors import explain_first_error

M = TypeVar("M", bound=BaseModel)

#: Minimum rate of a body, in bytes per second, once `timeouts.body` has passed. A slower body is
#: rejected.
MIN_BODY_BYTES_PER_SECOND = 1024
#: Maximum time for a whole body, as a multiple of `timeouts.body`. Bounds the time that fast first
#: bytes gain.
MAX_BODY_TIMEOUT_FACTOR = 10
#: Number of bytes of a body that are examined before other requests run again. Bounds the delay of
#: other requests.
SLICE_BYTES = 2**16
#: Maximum number of characters of a body besides its prompt. Tools and schemas are such characters.
NON_PROMPT_CHARACTERS = 2**20
#: Cost of a key or a container relative to the cost of a value. Measured with the request models:
#: 0.8 µs and 0.1 µs.
_CONTAINER_COST = 8
#: Cost of a body above which it waits for its turn: half a millisecond to parse, after which the
#: endpoint converts the body for about as long.
_MAX_UNQUEUED_COST = 4096
#: Bytes of memory per unit of cost until the request ends. Measured: 7 to 64 in the request models,
#: and less in the messages made from the models.
PARSED_BYTES = 48
#: Maximum size of a body whose cost is not computed, in bytes. Such a body takes at most 80 KB of
#: memory when parsed.
_UNWEIGHED_BYTES = 2048
#: Estimated bytes of memory above which the cost is computed again without the contents of strings.
#: The exact computation is slower, and matters only for large estimates.
_EXACT_FROM_BYTES = 2**18
#: Maximum number of digits of an integer that Python converts to text. Longer integers raise a
#: ValueError.
_MAX_INTEGER_DIGITS = 4300
#: Number of bytes by which two slices overlap, so that no suspicious number or escape is cut.
_OVERLAP = 512
#: Translation table that maps the first bytes of characters of four bytes to 255, and the escapes of
#: such characters in JSON to `\ud8`, so that all of them look alike.
_WIDE_CLASSES = bytes(range(128)).replace(b"D", b"d").translate(
    bytes(56 if byte in b"89abAB" else byte for byte in range(256))
) + bytes(255 if 0xF0 <= byte <= 0xF4 else 128 for byte in range(128, 256))
#: Translation table that maps digits to 0, exponent marks to e, and other bytes to a blank, so that
#: all numbers look alike.
_DIGIT_CLASSES = bytes(48 if chr(byte).isdigit() else 101 if byte in b"eE" else 32 for byte in range(128)) + bytes(128)


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
    """A base of request models.

    Validation of a list stops at the first invalid item, so that a hostile body causes one error
    and not millions.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_at_first_error(schema)
        return schema


@dataclass(slots=True)
class BodyReader:
    """A reader that validates request bodies within the limits of a gateway.

    Attributes:
        limits: The limits on the size and the JSON cost of a body.
        timeout: The seconds that may pass between two parts of a body, and before a slow body is
            rejected.
        hold: Counts bytes against the limit on what all requests hold until they end. Raises
            UnavailableError beyond the limit.
        turn: Returns the turn of a caller, by its `Caller.share`, to have an expensive body
            examined and parsed. One turn is held at a time.
    """

    limits: RequestLimits
    timeout: float
    hold: Callable[[int, RequestContext], None]
    turn: Callable[[str], AbstractAsyncContextManager[None]]

    async def load(self, model: type[M], request: Request) -> M:
        """Read the request's body and return it as a `model`.

        Raises:
            ApiError: The body is too large, too slow or malformed, or does not match `model`.
        """
        context = context_of(request)
        body = await self.read(request)
        context.work_bytes = len(body)
        is_expensive = len(body) > SLICE_BYTES or (
            len(body) > _UNWEIGHED_BYTES and _json_cost(body) > _MAX_UNQUEUED_COST
        )
        async with self.turn(context.caller.share) if is_expensive else nullcontext():
            cost, suspect = await check_json_size(body, self.limits.json_values, self.limits.prompt_bytes)
            if cost:
                self.hold(PARSED_BYTES * cost, context)
            if is_expensive:
                # The task continues in the same iteration, also to convert the body. The next body
                # is parsed in a later one, because of this pause.
                await asyncio.sleep(0)
            value = await parse_body(model, body)
        if suspect:
            reject_non_finite_numbers(body)
        return value

    async def read(self, request: Request) -> bytes:
        """Return the request's body.

        Raises:
            ApiError: The body is too large or too slow.
        """
        context = context_of(request)
        length = context.headers.get(b"content-length", b"0")
        if length.isdigit() and (len(length) > 18 or int(length) > self.limits.body_bytes):
            raise self._too_large()
        parts: list[bytes] = []
        size, more, started = 0, True, monotonic()
        cycle = getattr(request.receive, "__self__", None)
        while more:
            # The whole body of most requests has arrived already, and reading it does not wait.
            if isinstance(cycle, RequestResponseCycle) and not cycle.more_body:
                part, more = await _receive_chunk(request)
            else:
                part, more = await self._receive_in_time(request, size, monotonic() - started)
            size += len(part)
            self.hold(len(part), context)
            if size > self.limits.body_bytes:
                raise self._too_large()
            parts.append(part)
        return b"".join(parts)

    async def _receive_in_time(self, request: Request, size: int, elapsed: float) -> tuple[bytes, bool]:
        """Return the next part of the body, and True if further parts follow.

        Args:
            request: The request.
            size: The number of bytes received so far.
            elapsed: The seconds that these bytes took.

        Raises:
            RequestTimeoutError: The part did not arrive in time.
        """
        try:
            async with asyncio.timeout(self.seconds_left(elapsed, size)):
                return await _receive_chunk(request)
        except TimeoutError:
            raise RequestTimeoutError(
                f"The body arrived too slowly ({size} bytes so far); send the request again over a faster connection."
            ) from None

    def seconds_left(self, elapsed: float, size: int) -> float:
        """Return the seconds within which more of a body must arrive.

        The bound on the whole body prevents a client that sends the first bytes fast from being
        silent for hours.

        Args:
            elapsed: Seconds since the gateway began to read the body.
            size: Bytes of the body received so far.
        """
        slowest = self.timeout + size / MIN_BODY_BYTES_PER_SECOND
        return min(self.timeout, min(slowest, MAX_BODY_TIMEOUT_FACTOR * self.timeout) - elapsed)

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"The body is larger than this gateway accepts ({self.limits.body_bytes} bytes); shorten it."
        )


async def _receive_chunk(request: Request) -> tuple[bytes, bool]:
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise CancelledStreamError
    return message.get("body", b""), bool(message.get("more_body"))


async def check_json_size(body: bytes, values: int, characters: int) -> tuple[int, bool]:
    """Estimate the cost of parsing a body, and reject a body that is too expensive.

    Args:
        body: The JSON text.
        values: The maximum cost: a value counts as one, a key or a container as eight.
        characters: The maximum number of characters of the prompt.

    Returns:
        The cost, 0 for a small body, and True if the body may contain a number that JSON does not
        allow.

    Raises:
        InvalidRequestError: The body has too many values.
        ContextLengthError: The body has more text than the prompt and other fields may have
            together.
    """
    cost = text_bytes = 0
    if len(body) > values // _CONTAINER_COST:
        cost, text_bytes = await _check_total_cost(body, values, characters + NON_PROMPT_CHARACTERS)
    elif len(body) > _UNWEIGHED_BYTES:
        cost = _json_cost(body)
    if PARSED_BYTES * cost > max(len(body), _EXACT_FROM_BYTES):
        # Code in a prompt has commas and brackets that are not values.
        cost = await json_cost_outside_strings(body, values)
    # The bytes of the body are already counted, so only the text's additional bytes are added.
    cost += max(0, text_bytes - len(body)) // PARSED_BYTES
    if len(body) <= SLICE_BYTES:
        return cost, may_have_non_finite_number(body)
    for start in range(0, len(body), SLICE_BYTES):
        if may_have_non_finite_number(body[start : start + SLICE_BYTES + _OVERLAP]):
            return cost, True
        await asyncio.sleep(0)
    return cost, False


def has_wide_character(body: bytes) -> bool:
    """Return True if the body has a character of four bytes in UTF-8, or an escape of one.

    A regular expression takes eight times as long.
    """
    classes = body.translate(_WIDE_CLASSES)
    return b"\xff" in classes or b"\\ud8" in classes


def may_have_non_finite_number(body: bytes) -> bool:
    """Return True if the body may contain a number that is not finite.

    Signs of such a number are NaN, Infinity, an exponent of three digits, or about 200 digits in a
    row, of which every tenth is examined. `translate` takes a fraction of the time of a regular
    expression.
    """
    # Searching for a single byte first is much faster than searching for the word.
    if (b"N" in body and b"NaN" in body) or (b"I" in body and b"Infinity" in body):
        return True
    classes = body.translate(_DIGIT_CLASSES, b"+")
    return b"0e000" in classes or b"0" * 20 in classes[::10]


def reject_non_finite_numbers(body: bytes) -> None:
    """Reject numbers that JSON does not allow, in a body that pydantic accepts.

    Pydantic accepts NaN and Infinity in fields of any type, and a response that contains them would
    not be valid JSON.

    Raises:
        InvalidRequestError: The body has NaN, Infinity, or a number that no double can represent.
    """

    def reject(literal: str) -> NoReturn:
        shown = literal if len(literal) <= 20 else literal[:20] + "…"
        raise InvalidRequestError(
            f"The body is not valid JSON: {shown} is not a valid JSON number. Send a finite number."
        )

    def parse_float(literal: str) -> float:
        value = float(literal)
        return value if math.isfinite(value) else reject(literal)

    def parse_integer(literal: str) -> int:
        return 0 if len(literal) <= _MAX_INTEGER_DIGITS else reject(literal)

    json.loads(body, parse_constant=reject, parse_float=parse_float, parse_int=parse_integer)


async def _check_total_cost(body: bytes, values: int, characters: int) -> tuple[int, int]:
    """Return the cost of a body including the contents of strings, and the bytes of its text.

    The bytes are an estimate of the memory: a Python string takes the width of its widest character
    (1, 2 or 4 bytes) for each character. Commas, colons and brackets in strings are not values. A
    cost over the limit is therefore computed again without strings, which is slow.

    Raises:
        InvalidRequestError: The body has more JSON values than allowed.
        ContextLengthError: The body has more text than allowed.
    """
    total, text, width = 0, 0, 1
    for start in range(0, len(body), SLICE_BYTES):
        piece = body[start : start + SLICE_BYTES]
        total += _json_cost(piece)
        escapes = piece.count(b"\\u")
        if width < 4 and (escapes or not piece.isascii()):
            # An escape may continue in the next slice.
            width = 4 if has_wide_character(body[start : start + SLICE_BYTES + _OVERLAP]) else 2
        # An escape counts as one character: a lower bound within strings, and exact outside of
        # them.
        text += len(piece.decode("utf-8", "ignore")) - 5 * escapes - piece.count(b"\\")
        await asyncio.sleep(0)
    if total > values and await json_cost_outside_strings(body, values) > values:
        raise InvalidRequestError(f"The body has more JSON values than this gateway accepts ({values}); send fewer.")
    if text > characters:
        raise ContextLengthError(
            f"The body has more text than this gateway accepts ({characters} characters); shorten it."
        )
    return total, width * text


async def json_cost_outside_strings(body: bytes, limit: int) -> int:
    """Return the cost of everything outside of strings.

    If the cost is above `limit`, any number above `limit` may be returned.
    """
    total = 0
    for piece in _outside_strings(body):
        total += _json_cost(piece)
        if total > limit:
            break
        await asyncio.sleep(0)
    return total


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """Yield the bytes outside of strings, slice by slice."""
    start, inside = 0, False
    while start < len(body):
        piece = body[start : start + SLICE_BYTES]
        # An escape must not be cut, so a backslash at the end of a slice moves to the next slice.
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and start + len(piece) < len(body):
            piece = piece[:-1]
        start += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[inside::2])
        inside ^= len(parts) % 2 == 0


def json_cost(text: str) -> int:
    """Return the cost of a JSON text, including the contents of its strings."""
    return _json_cost(text.encode("utf-8", "replace"))


def _json_cost(text: bytes) -> int:
    return text.count(b",") + _CONTAINER_COST * (text.count(b":") + text.count(b"[") + text.count(b"{"))


async def parse_body(model: type[M], body: bytes) -> M:
    """Parse a JSON body and return it as a `model`.

    Raises:
        InvalidRequestError: The body is invalid. `param` names the field, as in
            `messages[0].content`.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        # The explanation parses the body again, so other requests run first.
        await asyncio.sleep(0)
        raise _explain_validation_error(error, body) from error


def validate_body(model: type[M], value: dict[str, Any]) -> M:
    """Validate a parsed body and return it as a `model`.

    Raises:
        InvalidRequestError: The body is invalid, as in `parse_body`.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _describe_first_error(error.errors(include_url=False, include_input=False), value) from error


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
    # A value that fits no branch of a union has an error per branch. The error with the longest
    # path belongs to the branch that the client probably meant.
    same_field = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    first = max(same_field, key=lambda error: len(_field_path(error, value)))
    param = "".join(_field_path(first, value)).lstrip(".") or None
    if first["type"] == "missing":
        return missing_parameter(param or "")
    clause = explain_first_error([first, *(error for error in same_field if error["loc"] == first["loc"])])[1]
    return InvalidRequestError(f"Invalid value for '{param}': {clause}.", param=param, code=_error_code(first["type"]))


def _error_code(kind: str) -> str:
    return "invalid_type" if kind.endswith("_type") else "invalid_value"


def _field_path(error: ErrorDetails, value: Any) -> list[str]:
    """Return the location of an error as the fields of the body that lead to it.

    The location's entries for branches of unions are left out, because they are not part of the
    body.
    """
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
