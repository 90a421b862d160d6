"""Requests that were sent to a replica and that no state of it counts yet. Pure, and kept in step with its view."""

from __future__ import annotations

from math import inf

from llmops.gateway.messages import ReplicaView


class Sent:
    """One of them. `mark`: its slot where the replica says which slots it has taken, else when it was sent; none while
    it has not left."""

    __slots__ = ("mark", "tokens")

    def __init__(self, tokens: int) -> None:
        self.mark, self.tokens = inf, tokens


class Unseen:
    """Of one replica, in the order in which they were sent."""

    def __init__(self, view: ReplicaView) -> None:
        self._view = view
        self._sent: dict[Sent, None] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, tokens: int, is_counted: bool) -> Sent:
        """With so many uncached prompt tokens. `is_counted`: the view has it already."""
        sent = Sent(tokens)
        self._sent[sent] = None
        if not is_counted:
            self._view.unseen += 1
            self._view.unseen_tokens += tokens
        return sent

    def seen(self, below: float) -> None:
        """A state counts those with a mark below this."""
        for sent in [sent for sent in self._sent if sent.mark < below]:
            self.remove(sent)

    def remove(self, sent: Sent) -> None:
        """Nobody needs to count it here any more. May be called again."""
        if sent in self._sent:
            del self._sent[sent]
            view = self._view
            view.unseen, view.unseen_tokens = max(view.unseen - 1, 0), max(view.unseen_tokens - sent.tokens, 0)

    def clear(self) -> None:
        for sent in list(self._sent):
            self.remove(sent)
