"""The text that new tokens add, as a pure function of the last tokens.

A function without state allows the responses of many requests to interleave, and a cancelled
request leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
#: The replacement character, which decoders write for bytes that do not form a character yet.
REPLACEMENT_CHARACTER = "\ufffd"
#: Maximum number of tokens of one character: a token for each byte of UTF-8.
_CHARACTER_TOKENS = 4


def text_delta(decode: Decode, context: Sequence[int], ids: Sequence[int], finished: bool) -> str:
    """Return the text that `ids` add after `context`.

    The text ends with the last token that completes a character. The concatenation over all calls
    equals the text of all tokens.

    Args:
        decode: Returns the text of a list of token ids.
        context: The earlier tokens: all of them, or at least as many as a character can have.
        ids: The new token ids.
        finished: True if no tokens follow, so that an incomplete character is returned as well.
    """
    tokens, start, before = [*context, *ids], 0, ""
    # A context may begin within a character. Decoders of byte tokens then decode none of the
    # following tokens.
    for skipped in range(min(_CHARACTER_TOKENS, len(context))):
        start, before = _last_complete(decode, tokens[skipped:], len(context) - skipped, 0)
        if start:
            tokens = tokens[skipped:]
            break
    if finished:
        after = decode(tokens)
    else:
        _, after = _last_complete(decode, tokens, len(tokens), start)
    return after[len(before) :]


def _last_complete(decode: Decode, tokens: Sequence[int], end: int, start: int) -> tuple[int, str]:
    """Return the length and text of the longest prefix that ends with a whole character.

    The prefix has at least `start` and at most `end` tokens.
    """
    for length in range(end, start, -1):
        text = decode(tokens[:length])
        if not text.endswith(REPLACEMENT_CHARACTER):
            return length, text
    return start, decode(tokens[:start]) if start else ""
