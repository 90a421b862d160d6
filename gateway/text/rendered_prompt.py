"""The text of a prompt, and which control tokens in it are the template's own."""

from __future__ import annotations

from typing import NamedTuple


class RenderedPrompt(NamedTuple):
    """`own`: where the template's control tokens start in `text`, and their ids, in order.

    What else reads like one came with a request and is text. None: whatever reads like a control token is one.
    """

    text: str
    own: tuple[tuple[int, int], ...] | None = None

    def cut(self, length: int) -> RenderedPrompt:
        """The first `length` characters."""
        own = self.own and tuple(one for one in self.own if one[0] < length)
        return RenderedPrompt(self.text[:length], own)

    def then(self, other: RenderedPrompt) -> RenderedPrompt:
        """Both, one after the other."""
        if self.own is None or other.own is None:
            return RenderedPrompt(self.text + other.text)
        moved = ((at + len(self.text), token) for at, token in other.own)
        return RenderedPrompt(self.text + other.text, (*self.own, *moved))
