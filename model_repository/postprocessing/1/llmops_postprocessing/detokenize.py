"""Token ids -> the text they add, as a pure function of the last tokens.

Without state the responses of many requests may interleave in any way, and a cancelled one leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
# how decoders write bytes that are not (yet) a character
REPLACEMENT_CHARACTER = "\ufffd"


def text_delta(decode: Decode, context: Sequence[int], ids: Sequence[int], finished: bool) -> str:
    """What `ids` add to the text of `context` (the tokens just before; all of them, or enough to hold a character).

    Returns the text up to the last token that completes a character; the rest comes with a later call, or now if
    `finished`. The concatenation over all calls is what decoding all tokens at once gives.
    """
    tokens = [*context, *ids]
    start, before = _last_complete(decode, tokens, len(context), 0)
    if finished:
        after = decode(tokens)
    else:
        _, after = _last_complete(decode, tokens, len(tokens), start)
    return after[len(before) :]


def _last_complete(decode: Decode, tokens: Sequence[int], end: int, start: int) -> tuple[int, str]:
    """The longest prefix of at most `end` and at least `start` tokens whose text ends with a whole character."""
    for length in range(end, start, -1):
        text = decode(tokens[:length])
        if not text.endswith(REPLACEMENT_CHARACTER):
            return length, text
    return start, decode(tokens[:start]) if start else ""
