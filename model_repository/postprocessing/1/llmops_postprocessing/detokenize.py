"""The text that new tokens add, as a pure function of the last tokens.

Without state, the responses of many requests may interleave, and a cancelled request leaves nothing
behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
#: Character that decoders write for bytes that are not a character yet.
REPLACEMENT_CHARACTER = "\ufffd"
#: Tokens of a character at most: a token per byte of UTF-8.
_CHARACTER_TOKENS = 4


def text_delta(decode: Decode, context: Sequence[int], ids: Sequence[int], finished: bool) -> str:
    """Return the text that `ids` add after `context`.

    The text ends with the last token that completes a character. The concatenation over all calls
    equals the text of all tokens.

    Args:
        decode: Decodes tokens.
        context: The tokens before, all of them or enough to hold a character.
        ids: The new tokens.
        finished: Return the rest of the text as well, because no tokens follow.
    """
    tokens, start, before = [*context, *ids], 0, ""
    # a context may begin within a character, and decoders of byte tokens then refuse all that follow
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

    The prefix has from `start` to `end` tokens.
    """
    for length in range(end, start, -1):
        text = decode(tokens[:length])
        if not text.endswith(REPLACEMENT_CHARACTER):
            return length, text
    return start, decode(tokens[:start]) if start else ""
