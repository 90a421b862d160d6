"""What a body will cost to parse, told from its bytes before anything is made of them.

Parsing holds the interpreter's lock, so no thread would help: a body is refused by its weight, and what is left to
parse takes tens of milliseconds at most. The bytes are looked at in slices, between which others have their turn.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterator

from llmops.gateway.errors import ContextLengthError, InvalidRequestError

SLICE_BYTES = 2**16
# A value costs about 0.1 us, a key or a container eight times that (measured with the wire's own types).
_CONTAINER_COST = 8
# characters of a body that are not its prompt
NON_PROMPT_CHARACTERS = 2**20

# What may stand for more than a double can hold: an exponent of three digits, or 200 digits (with an exponent of two),
# of which each tenth is looked at. Found where all digits look alike, as expressions take two to six times as long.
_DIGIT_CLASSES = bytes(48 if chr(byte).isdigit() else 101 if byte in b"eE" else 32 for byte in range(128)) + bytes(128)
_LARGE_EXPONENT = re.compile(rb"\d[eE]\+?\d{3}")
_LONG = re.compile(rb"[\d.]{190}")
_BETWEEN = re.compile(rb"[\s,:\[\]{}]+")
# digits that Python makes a number of, and a number text
_MAX_INTEGER_DIGITS = 4300
# bytes of two neighbouring slices in which a number is looked for
_OVERLAP = 512


async def check_json_size(body: bytes, values: int, characters: int) -> bool:
    """Whether something in `body` may be a number that JSON does not have.

    Raises InvalidRequestError when its JSON has more than `values` values, a key or a container counting for eight,
    and ContextLengthError when it has more text than `characters` and what else a request may need.
    """
    if len(body) > values // _CONTAINER_COST:
        await _check_total_cost(body, values, characters + NON_PROMPT_CHARACTERS)
    if len(body) <= SLICE_BYTES:
        return may_have_non_finite_number(body)
    for start in range(0, len(body), SLICE_BYTES):
        if may_have_non_finite_number(body[start : start + SLICE_BYTES + _OVERLAP]):
            return True
        await asyncio.sleep(0)
    return False


def may_have_non_finite_number(body: bytes) -> bool:
    # a single byte is looked for much faster than several
    if (b"N" in body and b"NaN" in body) or (b"I" in body and b"Infinity" in body):
        return True
    alike = body.translate(_DIGIT_CLASSES, b"+")
    return b"0e000" in alike or b"0" * 20 in alike[::10]


async def _check_total_cost(body: bytes, values: int, characters: int) -> None:
    """Commas, colons and brackets inside strings are not values: they are excluded once the total is over the limit."""
    total = text = 0
    for start in range(0, len(body), SLICE_BYTES):
        piece = body[start : start + SLICE_BYTES]
        total += _json_cost(piece)
        text += _characters(piece)
        await asyncio.sleep(0)
    if total > values and await json_cost_outside_strings(body, values) > values:
        raise InvalidRequestError(f"The body has more JSON values than this gateway accepts ({values}).")
    if text > characters:
        raise ContextLengthError(f"The body has more text than this gateway accepts ({characters} characters).")


async def json_cost_outside_strings(body: bytes, enough: int) -> int:
    """The weight of what stands outside of texts; at least `enough` when it is more than that."""
    total = 0
    for piece in _outside_strings(body):
        total += _json_cost(piece)
        if total > enough:
            break
        await asyncio.sleep(0)
    return total


async def reject_non_finite_numbers(body: bytes) -> None:
    """Raises InvalidRequestError when valid JSON, as pydantic sees it, has a number that JSON does not have.

    Pydantic lets NaN and Infinity through wherever a field takes anything; in an answer they would be no JSON.
    """
    rest = b""
    for piece in _outside_strings(body):
        piece = rest + piece
        # a number may go on in the next slice
        whole = max(piece.rfind(mark) for mark in (b",", b":", b"]", b"}")) + 1
        rest = piece[whole:]
        _reject_non_finite(piece[:whole])
        await asyncio.sleep(0)
    _reject_non_finite(rest)


def _reject_non_finite(piece: bytes) -> None:
    # digits of many short numbers look like one where only each tenth is looked at
    if b"N" in piece or b"I" in piece or _LARGE_EXPONENT.search(piece) or _LONG.search(piece):
        for literal in _BETWEEN.split(piece):
            if len(literal) > 2 and not _finite(literal):
                shown = literal.decode() if len(literal) <= 20 else literal[:20].decode() + "…"
                raise InvalidRequestError(f"The body is not valid JSON: {shown} is not a valid JSON number.")


def _finite(literal: bytes) -> bool:
    if literal in (b"true", b"false", b"null"):
        return True
    if literal.lstrip(b"-").isdigit():
        return len(literal) <= _MAX_INTEGER_DIGITS
    return math.isfinite(float(literal))


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """What stands outside of texts, in slices."""
    start, inside = 0, False
    while start < len(body):
        piece = body[start : start + SLICE_BYTES]
        # an escape is not to be cut: a backslash that ends the slice belongs to the next one
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and start + len(piece) < len(body):
            piece = piece[:-1]
        start += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[inside::2])
        inside ^= len(parts) % 2 == 0


def _characters(piece: bytes) -> int:
    """A lower bound for its strings, exact for everything else; an escape counts as one."""
    return len(piece.decode("utf-8", "ignore")) - 5 * piece.count(b"\\u") - piece.count(b"\\")


def json_cost(text: str) -> int:
    """That of a text that holds JSON; what stands in its own texts counts as well."""
    return text.count(",") + _CONTAINER_COST * (text.count(":") + text.count("[") + text.count("{"))


def _json_cost(text: bytes) -> int:
    return text.count(b",") + _CONTAINER_COST * (text.count(b":") + text.count(b"[") + text.count(b"{"))
