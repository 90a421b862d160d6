"""Requests that were sent to a replica and are not in its state yet. Pure, and kept in step with its view.

A replica that reports its state names the requests it counts. On a measured one a request is seen when its first token
arrives.
"""

from __future__ import annotations

from math import inf

from llmops.gateway.interfaces import ReplicaView


class InFlightRequest:
    """A request at a replica.

    Attributes:
        prompt: Tokens of its prompt.
        tokens: Those of them that were not cached, as far as the gateway knows.
        mark: Its slot, on a replica that reports which slots it has taken.
        at: Seconds of the clock when it was sent to a measured replica.
        step: Number of the step with its last token, negative before the first token.
        made: Tokens of its answer so far.
    """

    __slots__ = ("at", "made", "mark", "prompt", "step", "tokens")

    def __init__(self, tokens: int, prompt: int = 0) -> None:
        self.mark, self.tokens, self.prompt = inf, tokens, prompt
        self.at, self.step, self.made = 0.0, -1, 0


class InFlightTracker:
    """Of one replica, in the order in which they were sent."""

    def __init__(self, view: ReplicaView) -> None:
        self.view = view
        self._sent: dict[InFlightRequest, None] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, tokens: int, is_counted: bool, prompt: int = 0) -> InFlightRequest:
        """Add a request of `prompt` tokens, `tokens` of them uncached. `is_counted`: the view has it already."""
        sent = InFlightRequest(tokens, prompt)
        self._sent[sent] = None
        if not is_counted:
            self.view.unseen += 1
            self.view.in_flight_tokens += tokens
        return sent

    def seen(self, below: float) -> None:
        """A state counts those with a mark below this."""
        for sent in [sent for sent in self._sent if sent.mark < below]:
            self.remove(sent)

    def remove(self, sent: InFlightRequest) -> None:
        """Nobody needs to count it here any more. May be called again."""
        if sent in self._sent:
            del self._sent[sent]
            view = self.view
            view.unseen, view.in_flight_tokens = max(view.unseen - 1, 0), max(view.in_flight_tokens - sent.tokens, 0)

    def clear(self) -> None:
        for sent in list(self._sent):
            self.remove(sent)
