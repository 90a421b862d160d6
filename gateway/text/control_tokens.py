"""Control tokens in prompts.

The module distinguishes the tokens that a chat template writes from text that a client sent.

The template's own control tokens are marked in its syntax tree, before it is compiled, so they
are known in the rendered prompt whatever the template does with the messages. A client cannot
write the mark. See docs/decisions/0008-untrusted-text.md.
"""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple

from jinja2 import nodes
from tokenizers import AddedToken, Tokenizer

from llmops.gateway.errors import InvalidRequestError

#: The form of control tokens that some tokenizers do not declare as special, such as DeepSeek's
#: <｜User｜>.
_CONTROL_SHAPE = re.compile(r"<[|｜][^\s<>]{1,64}[|｜]>")

#: The form of tokens that stand for one byte. They are text.
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")

#: Characters of the random marks. Unicode assigns none of them.
_PRIVATE_USE = range(0xE000, 0xF8FF)

#: Characters of a control token's beginning that are marked. A template may write a token in parts:
#: '<|' + role + '|>'.
_SHORTEST_BEGINNING = 2
#: Characters of the longest beginning that is marked. A token of a stranger's tokenizer may have
#: 60,000, and all of its beginnings together gigabytes.
_LONGEST_BEGINNING = 64

#: Levels at which control tokens with the same beginning are told apart before they are tried one
#: by one. A stranger's tokens could otherwise be nested too deeply for a regular expression.
_SHARED_BEGINNINGS = 16

#: The filter that removes marks from a text before a template compares it.
UNMARK_FILTER = "llmops unmark"

#: Methods and filters whose first argument is searched for or cut off, and therefore not written
#: into the prompt.
_SEARCHING = frozenset(
    ["count", "endswith", "find", "index", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind",
     "rindex", "rpartition", "rsplit", "rstrip", "split", "startswith", "strip", "trim"]
)  # fmt: skip


class RenderedPrompt(NamedTuple):
    """The text of a prompt.

    `own` has the offset and id of each control token that the template wrote, in order. Other texts
    that look like control tokens came with the request and are text. With None, every such text is
    a control token.
    """

    text: str
    own: tuple[tuple[int, int], ...] | None = None

    def cut(self, length: int) -> RenderedPrompt:
        """Return the first `length` characters."""
        return RenderedPrompt(self.text[:length], self.own and tuple(one for one in self.own if one[0] < length))

    def then(self, other: RenderedPrompt) -> RenderedPrompt:
        """Return this prompt followed by `other`."""
        if self.own is None or other.own is None:
            return RenderedPrompt(self.text + other.text)
        moved = ((at + len(self.text), token) for at, token in other.own)
        return RenderedPrompt(self.text + other.text, (*self.own, *moved))


def find_control_tokens(tokenizer: Tokenizer, unknown: str | None) -> dict[str, int]:
    """Return the added tokens that structure a prompt, with their ids.

    The token `unknown` and tokens for bytes are left out.
    """
    added = tokenizer.get_added_tokens_decoder()
    found = {
        one.content: number for number, one in added.items() if one.special or _CONTROL_SHAPE.fullmatch(one.content)
    }
    return {
        text: number for text, number in found.items() if text and text != unknown and not _BYTE_TOKEN.fullmatch(text)
    }


class ControlTokens:
    """The control tokens of a tokenizer.

    Marks and finds them in texts and encodes prompts that hold them.

    Adds one token to the tokenizer, the alias, which stands for a text that must not become a
    control token.
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

        A beginning of a control token at the end of the text is marked too.
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
        """Return True if `text` has a control token in it."""
        return self._pattern.search(text) is not None

    def texts_in(self, text: str) -> Iterable[tuple[int, str]]:
        """Return the offset and text of each control token in `text`."""
        return ((found.start(), found[0]) for found in self._pattern.finditer(text))

    # -- rendered prompts

    def read(self, rendered: str) -> RenderedPrompt:
        """Return the prompt that a marked template rendered.

        A mark without a control token behind it is ignored.
        """
        pieces = rendered.split(self._mark)
        begun = zip(accumulate(map(len, pieces)), map(self._pattern.match, pieces[1:]), strict=False)
        own = [(at, self._tokens[found[0]]) for at, found in begun if found]
        return RenderedPrompt("".join(pieces), tuple(own))

    def with_composed(self, prompt: RenderedPrompt, composed: frozenset[str]) -> RenderedPrompt:
        """Return `prompt` with the tokens in `composed` as the template's own everywhere.

        The template writes these tokens in parts.
        """
        known = dict(prompt.own or ())
        known.update((at, self._tokens[text]) for at, text in self.texts_in(prompt.text) if text in composed)
        return RenderedPrompt(prompt.text, tuple(sorted(known.items())))

    def encode(self, prompt: RenderedPrompt, ids: list[int]) -> list[int]:
        """Return the token ids of `prompt`.

        Control tokens that are not the template's are encoded as text.

        Args:
            prompt: The prompt.
            ids: The plain encoding of its text, which is returned if it has the template's
                control tokens only.

        Raises:
            InvalidRequestError: A text cannot be kept apart from the control token.
        """
        own = [token for _, token in prompt.own or ()]
        if [one for one in ids if one in self._ids] == own:
            return ids
        text, replaced = self._with_aliases(prompt)
        encoded: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if [one for one in encoded if one in self._ids] != own or encoded.count(self.alias_id) != len(replaced):
            raise InvalidRequestError(
                "The messages hold the text of one of this model's control tokens in a way that cannot be kept apart "
                "from the token itself.",
                param="messages",
            )
        texts = iter(replaced)
        return [i for one in encoded for i in (self._ids_as_text[next(texts)] if one == self.alias_id else (one,))]

    def _with_aliases(self, prompt: RenderedPrompt) -> tuple[str, list[str]]:
        """Return the text with an alias for each control token that is a client's text.

        The second value lists the texts of the replaced control tokens.
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
    """Return the regular expression of `texts`, of which the longest one matches.

    Texts with the same beginning share it. Mistral has 1,000 control tokens that begin with `<`:
    one by one, they would take ten microseconds at each `<` of a prompt, with the interpreter's
    lock.
    """
    if not levels:
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    groups: dict[str, list[str]] = {}
    # the empty text, which follows the longest beginning, is tried last
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
    """Return the token ids of a control token's text as if it were ordinary text.

    The text is encoded as if it stood in the middle of a line.
    """
    tokenizer.encode_special_tokens = True
    try:
        before, whole = (tokenizer.encode(one, add_special_tokens=False).ids for one in ("\n", "\n" + text))
        if tokenizer.token_to_id(text) in whole:  # an added token that is not declared as special is found even then
            return (*_encode(tokenizer, text[:1]), *_encode(tokenizer, text[1:]))
        return tuple(whole[len(before) :]) if whole[: len(before)] == before else _encode(tokenizer, text)
    finally:
        tokenizer.encode_special_tokens = False


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


class ControlTokenMarker:
    """A visitor that marks the control tokens which a chat template writes, in its syntax tree.

    Texts that the template only compares with a client's, such as `'<|x|>' in content` or
    `content.split('<|x|>')`, stay as they are.
    """

    def __init__(self, controls: ControlTokens, special_tokens: Mapping[str, str]) -> None:
        self._controls = controls
        self._names = frozenset(special_tokens)

    def mark(self, node: nodes.Node) -> None:
        """Change the tree under `node` in place."""
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
        """Return the children of `node` that are compared with other texts and not written."""
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
        """Compare both sides without marks if one of them names a control token."""
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
