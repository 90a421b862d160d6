"""A tokenizer's control tokens, and telling those that a template writes from their text in what clients send.

The template's own are marked where it is compiled (`marking.py`), so they are known in what it renders, whatever it
does with the messages; a client cannot write the mark. See docs/decisions/0008-untrusted-text.md.
"""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Iterable, Mapping
from itertools import accumulate

from tokenizers import AddedToken, Tokenizer

from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.text.rendered_prompt import RenderedPrompt

# some tokenizers do not call their turns' markers special: DeepSeek's <｜User｜>
_SHAPE = re.compile(r"<[|｜][^\s<>]{1,64}[|｜]>")
# what stands for a byte that the vocabulary has no text for
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_PRIVATE_USE = range(0xE000, 0xF8FF)
# a template may write a control token in parts, '<|' + role + '|>': so much of its beginning stands for it
_SHORTEST_BEGINNING = 2


def find_control_tokens(tokenizer: Tokenizer, unknown: str | None) -> dict[str, int]:
    """The added tokens that structure a prompt, with their ids. `unknown` and bytes stand for text."""
    added = tokenizer.get_added_tokens_decoder()
    found = {one.content: number for number, one in added.items() if one.special or _SHAPE.fullmatch(one.content)}
    return {text: number for text, number in found.items() if text and text != unknown and not _BYTE.fullmatch(text)}


class ControlTokens:
    """Marks, finds and encodes. Adds one token to `tokenizer`, which stands for what must not become one."""

    def __init__(self, tokenizer: Tokenizer, tokens: Mapping[str, int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = dict(tokens)
        self._ids = frozenset(tokens.values())
        self._pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")
        self._beginnings = frozenset(text[:n] for text in tokens for n in range(_SHORTEST_BEGINNING, len(text)))
        self._mark, self._alias = _random_mark(), _random_mark()
        self._plain = {text: _as_text(tokenizer, text) for text in tokens}
        tokenizer.add_special_tokens([AddedToken(self._alias, special=True, normalized=False)])
        self.alias_id = int(tokenizer.token_to_id(self._alias))

    # -- the template's side ---------------------------------------------------------------------------------------

    def mark(self, text: str) -> str:
        """A text of the template's own, with the mark before each control token and before a beginning at its end."""
        marked = self._pattern.sub(lambda found: self._mark + found[0], text)
        for size in range(min(64, len(marked)), _SHORTEST_BEGINNING - 1, -1):
            if marked[-size:] in self._beginnings and not marked[:-size].endswith(self._mark):
                return marked[:-size] + self._mark + marked[-size:]
        return marked

    def unmark(self, text: str) -> str:
        return text.replace(self._mark, "")

    def found_in(self, text: str) -> bool:
        return self._pattern.search(text) is not None

    def texts_in(self, text: str) -> Iterable[tuple[int, str]]:
        return ((found.start(), found[0]) for found in self._pattern.finditer(text))

    # -- the prompt's side -----------------------------------------------------------------------------------------

    def read(self, rendered: str) -> RenderedPrompt:
        """What a marked template rendered. A mark that no control token follows says nothing."""
        pieces, tokens = rendered.split(self._mark), self._tokens
        begun = zip(accumulate(map(len, pieces)), map(self._pattern.match, pieces[1:]), strict=False)
        own = [(at, tokens[found[0]]) for at, found in begun if found]
        return RenderedPrompt("".join(pieces), tuple(own))

    def with_composed(self, prompt: RenderedPrompt, composed: frozenset[str]) -> RenderedPrompt:
        """Also these count as the template's: it writes them in parts that cannot be followed."""
        known = dict(prompt.own or ())
        known.update((at, self._tokens[text]) for at, text in self.texts_in(prompt.text) if text in composed)
        return RenderedPrompt(prompt.text, tuple(sorted(known.items())))

    def encode(self, prompt: RenderedPrompt, ids: list[int]) -> list[int]:
        """`ids` is the text's plain encoding: right as it is unless it has control tokens that are not the template's.

        Those are then encoded as the text that they are. Raises InvalidRequestError where that cannot be done.
        """
        own = [token for _, token in prompt.own or ()]
        if self._controls(ids) == own:
            return ids
        text, replaced = self._aliased(prompt)
        encoded: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if self._controls(encoded) != own or encoded.count(self.alias_id) != len(replaced):
            raise InvalidRequestError(
                "The messages hold the text of one of this model's control tokens in a way that cannot be kept apart "
                "from the token itself.",
                param="messages",
            )
        texts = iter(replaced)
        return [i for one in encoded for i in (self._plain[next(texts)] if one == self.alias_id else (one,))]

    def _controls(self, ids: list[int]) -> list[int]:
        return list(filter(self._ids.__contains__, ids))

    def _aliased(self, prompt: RenderedPrompt) -> tuple[str, list[str]]:
        """The text with the alias for each control token that is not the template's, and those tokens' texts."""
        parts, replaced, at = [], [], 0
        names = {number: text for text, number in self._tokens.items()}
        for start, token in (*(prompt.own or ()), (len(prompt.text), None)):
            between = prompt.text[at:start]
            replaced += self._pattern.findall(between)
            parts.append(self._pattern.sub(self._alias, between))
            if token is not None:
                parts.append(names[token])
                at = start + len(names[token])
        return "".join(parts), replaced


def _random_mark() -> str:
    chance = random.Random(secrets.randbits(256))
    return "".join(chr(chance.choice(_PRIVATE_USE)) for _ in range(8))


def _as_text(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The ids of a control token's text as if it were none, in the middle of a line."""
    tokenizer.encode_special_tokens = True
    try:
        before, whole = (tokenizer.encode(one, add_special_tokens=False).ids for one in ("\n", "\n" + text))
        known = tokenizer.token_to_id(text)
        if known in whole:  # not called special, so it is found even then
            return (*_ids(tokenizer, text[:1]), *_ids(tokenizer, text[1:]))
        return tuple(whole[len(before) :]) if whole[: len(before)] == before else _ids(tokenizer, text)
    finally:
        tokenizer.encode_special_tokens = False


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)
