"""Distinction between control tokens that a chat template writes and text from clients.

Control tokens of the template are marked in its syntax tree before the template is compiled. The
rendered prompt therefore shows which tokens the template wrote, whatever the template does with
messages. A client cannot write the mark, because it is random. See
docs/decisions/0008-untrusted-text.md.
"""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

from jinja2 import nodes
from tokenizers import AddedToken, Tokenizer

from llmops.gateway.errors import InvalidRequestError

#: Pattern of control tokens that some tokenizers do not declare as special, such as DeepSeek's
#: <｜User｜>.
_CONTROL_SHAPE = re.compile(r"<[|｜][^\s<>]{1,64}[|｜]>")

#: Pattern of tokens that stand for a single byte. Such tokens are text and not control tokens.
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")

#: Characters that the random marks consist of. Unicode assigns no meaning to them.
_PRIVATE_USE = range(0xE000, 0xF8FF)

#: Minimum length of a control token's beginning that is marked, in characters. A template may write
#: a token in parts, such as '<|' + role + '|>'.
_SHORTEST_BEGINNING = 2
#: Maximum length of a control token's beginning that is marked, in characters. An untrusted
#: tokenizer may have tokens of 60,000 characters, whose beginnings together would take gigabytes.
_LONGEST_BEGINNING = 64

#: Maximum depth of groups for shared beginnings in the pattern of control tokens. An untrusted
#: tokenizer's tokens could otherwise nest too deeply for a regular expression.
_SHARED_BEGINNINGS = 16

#: Name of the filter that removes marks from a text before a template compares the text.
UNMARK_FILTER = "llmops unmark"

#: Methods and filters whose first argument is searched for or removed, and is therefore not written
#: into the prompt.
_SEARCHING = frozenset(
    ["count", "endswith", "find", "index", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind",
     "rindex", "rpartition", "rsplit", "rstrip", "split", "startswith", "strip", "trim"]
)  # fmt: skip


class RenderedPrompt(NamedTuple):
    """The text of a prompt, and the control tokens that the template wrote into it.

    Attributes:
        text: The text.
        own: The offset and id of each control token that the template wrote, in order. Other texts
            that look like control tokens came with the request and are text. With None, each such
            text is a control token.
    """

    text: str
    own: tuple[tuple[int, int], ...] | None = None

    def cut(self, length: int) -> RenderedPrompt:
        """Return the first `length` characters of the prompt."""
        return RenderedPrompt(self.text[:length], self.own and tuple(one for one in self.own if one[0] < length))

    def then(self, other: RenderedPrompt) -> RenderedPrompt:
        """Return this prompt followed by `other`."""
        if self.own is None or other.own is None:
            return RenderedPrompt(self.text + other.text)
        moved = ((at + len(self.text), token) for at, token in other.own)
        return RenderedPrompt(self.text + other.text, (*self.own, *moved))


def find_control_tokens(tokenizer: Tokenizer, unknown: str | None) -> dict[str, int]:
    """Return the added tokens that structure a prompt, with their ids.

    The token `unknown` and tokens for bytes are not included.
    """
    added = tokenizer.get_added_tokens_decoder()
    found = {
        one.content: number for number, one in added.items() if one.special or _CONTROL_SHAPE.fullmatch(one.content)
    }
    return {
        text: number for text, number in found.items() if text and text != unknown and not _BYTE_TOKEN.fullmatch(text)
    }


class ControlTokens:
    """The control tokens of a tokenizer, to mark and find in texts and to encode in prompts.

    The constructor adds a token to the tokenizer: the alias, which stands for a text that must not
    become a control token.

    Attributes:
        alias_id: The id of the alias.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: Mapping[str, int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = dict(tokens)
        self._ids = frozenset(tokens.values())
        self._pattern = re.compile(_any_of([*tokens]) or r"(?!)")
        self._beginnings = frozenset(
            text[:n] for text in tokens for n in range(_SHORTEST_BEGINNING, min(len(text), _LONGEST_BEGINNING + 1))
        )
        self._mark, self._alias = _random_mark(), _random_mark()
        self._ids_as_text = {text: _encode_as_text(tokenizer, text) for text in tokens}
        tokenizer.add_special_tokens([AddedToken(self._alias, special=True, normalized=False)])
        self.alias_id = int(tokenizer.token_to_id(self._alias))

    # -- texts of templates

    def mark(self, text: str) -> str:
        """Return a text of the template with a mark before each control token.

        The beginning of a control token at the end of the text is marked, too.
        """
        marked = self._pattern.sub(lambda found: self._mark + found[0], text)
        for size in range(min(_LONGEST_BEGINNING, len(marked)), _SHORTEST_BEGINNING - 1, -1):
            if marked[-size:] in self._beginnings and not marked[:-size].endswith(self._mark):
                return marked[:-size] + self._mark + marked[-size:]
        return marked

    def unmark(self, text: str) -> str:
        """Return `text` without marks."""
        return text.replace(self._mark, "")

    def found_in(self, text: str) -> bool:
        """Return True if `text` contains a control token."""
        return self._pattern.search(text) is not None

    def places_in(self, text: str) -> list[int]:
        """Return the offset of each control token in `text`."""
        return [found.start() for found in self._pattern.finditer(text)]

    # -- rendered prompts

    def read(self, rendered: str) -> RenderedPrompt:
        """Return the prompt that a marked template rendered.

        A mark that no control token follows is ignored.
        """
        pieces = rendered.split(self._mark)
        begun = zip(accumulate(map(len, pieces)), map(self._pattern.match, pieces[1:]), strict=False)
        own = [(at, self._tokens[found[0]]) for at, found in begun if found]
        return RenderedPrompt("".join(pieces), tuple(own))

    def encode(self, prompt: RenderedPrompt, ids: list[int]) -> list[int]:
        """Return the token ids of `prompt`.

        Control tokens that the template did not write are encoded as text.

        Args:
            prompt: The prompt.
            ids: The plain encoding of the prompt's text, returned unchanged if the template wrote
                all of its control tokens.

        Raises:
            InvalidRequestError: A text cannot be encoded without becoming a control token.
        """
        own = [token for _, token in prompt.own or ()]
        if [one for one in ids if one in self._ids] == own:
            return ids
        text, replaced = self._with_aliases(prompt)
        encoded: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if [one for one in encoded if one in self._ids] != own or encoded.count(self.alias_id) != len(replaced):
            raise InvalidRequestError(
                "The messages contain the text of one of this model's control tokens in a way that cannot be kept "
                "apart from the token itself; remove the text.",
                param="messages",
            )
        texts = iter(replaced)
        return [i for one in encoded for i in (self._ids_as_text[next(texts)] if one == self.alias_id else (one,))]

    def _with_aliases(self, prompt: RenderedPrompt) -> tuple[str, list[str]]:
        """Return the prompt's text with an alias for each control token in text from clients.

        The second value lists the texts that aliases replace.
        """
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


def _any_of(texts: list[str], levels: int = _SHARED_BEGINNINGS) -> str:
    """Return a regular expression that matches the longest of `texts`.

    Texts with the same beginning share its pattern. Mistral has 1,000 control tokens that begin
    with `<`; to try them one by one would take ten microseconds at each `<` of a prompt, while
    holding the interpreter lock.

    Args:
        texts: The texts.
        levels: The maximum depth of groups for shared beginnings.
    """
    if not levels:
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    groups: dict[str, list[str]] = {}
    # In this order, the empty rest of a text that is a beginning of others is tried last.
    for text in sorted(texts, reverse=True):
        groups.setdefault(text[:1], []).append(text)
    parts = []
    for group in groups.values():
        most, least = group[0], group[-1]
        shared = least[: next((at for at, one in enumerate(least) if one != most[at]), len(least))]
        rest = [text[len(shared) :] for text in group]
        parts.append(re.escape(shared) + (f"(?:{_any_of(rest, levels - 1)})" if len(group) > 1 else ""))
    return "|".join(parts)


def _random_mark() -> str:
    chance = random.Random(secrets.randbits(256))
    return "".join(chr(chance.choice(_PRIVATE_USE)) for _ in range(8))


def _encode_as_text(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the token ids of a control token's text, encoded as ordinary text.

    The text is encoded as if it were in the middle of a line.
    """
    tokenizer.encode_special_tokens = True
    try:
        before, whole = (tokenizer.encode(one, add_special_tokens=False).ids for one in ("\n", "\n" + text))
        # An added token that is not declared as special is found even then, so its text is split.
        if tokenizer.token_to_id(text) in whole:
            return (*_encode(tokenizer, text[:1]), *_encode(tokenizer, text[1:]))
        return tuple(whole[len(before) :]) if whole[: len(before)] == before else _encode(tokenizer, text)
    finally:
        tokenizer.encode_special_tokens = False


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


class ControlTokenMarker:
    """A visitor that marks the control tokens which a chat template's syntax tree writes.

    Texts that the template only compares with a client's text, such as `'<|x|>' in content` or
    `content.split('<|x|>')`, are not marked.
    """

    def __init__(self, controls: ControlTokens, special_tokens: Mapping[str, str]) -> None:
        self._controls = controls
        self._names = frozenset(special_tokens)

    def mark(self, node: nodes.Node) -> None:
        """Mark the texts in the tree under `node`, which is changed in place."""
        if isinstance(node, nodes.TemplateData):
            node.data = self._controls.mark(node.data)
        elif isinstance(node, nodes.Const):
            if isinstance(node.value, str):
                node.value = self._controls.mark(node.value)
        elif isinstance(node, nodes.Compare):
            self._unmark_comparison(node)
        else:
            searched = self._search_operands(node)
            for child in node.iter_child_nodes():
                if not any(child is one for one in searched):
                    self.mark(child)

    def _search_operands(self, node: nodes.Node) -> list[nodes.Node]:
        """Return the children of `node` that are compared with other texts and never written."""
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr in _SEARCHING:
            return list(node.args[:1])
        if isinstance(node, nodes.Filter) and node.name in _SEARCHING:
            return list(node.args[:1])
        if isinstance(node, nodes.Test):
            return list(node.args or ())
        if isinstance(node, nodes.Getitem):
            return [node.arg]
        return [node.key] if isinstance(node, nodes.Pair) else []

    def _unmark_comparison(self, node: nodes.Compare) -> None:
        """Remove the marks from both sides of a comparison if one side names a control token."""
        if any(self._names_control(side) for side in (node.expr, *(operand.expr for operand in node.ops))):
            node.expr = _unmarked(node.expr)
            for operand in node.ops:
                operand.expr = _unmarked(operand.expr)

    def _names_control(self, node: nodes.Expr) -> bool:
        parts = [node, *node.find_all((nodes.Name, nodes.Const))]
        names = any(part.name in self._names for part in parts if isinstance(part, nodes.Name))
        texts = (part.value for part in parts if isinstance(part, nodes.Const) and isinstance(part.value, str))
        return names or any(map(self._controls.found_in, texts))


def _unmarked(node: nodes.Expr) -> nodes.Expr:
    is_constant = isinstance(node, nodes.Const)
    return node if is_constant else nodes.Filter(node, UNMARK_FILTER, [], [], None, None, lineno=node.lineno)
