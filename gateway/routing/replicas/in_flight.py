"""Requests that were sent to a replica and are not included in its reported state yet.

The code is pure: it uses neither a clock nor I/O. A replica that reports its state names the slots
that the state includes. On other (measured) replicas, a request is in flight until its first token.
"""

from __future__ import annotations

from math import inf

from llmops.gateway.interfaces import ReplicaView


class InFlightRequest:
    """A request on a replica.

    Attributes:
        prompt: Number of prompt tokens.
        tokens: Number of prompt tokens that were not cached, as far as the gateway knows.
        slot: Slot of the request, on a replica that reports its state.
        sent_at: Time in seconds at which the request was sent, on a replica that does not report
            its state.
        step: Number of the step with the latest token, negative before the first token.
        output: Number of output tokens so far.
    """

    def __init__(self, tokens: int, prompt: int = 0) -> None:
        self.slot, self.tokens, self.prompt = inf, tokens, prompt
        self.sent_at, self.step, self.output = 0.0, -1, 0


class InFlightTracker:
    """The in-flight requests of one replica, in the order of sending."""

    def __init__(self, view: ReplicaView) -> None:
        """Create a tracker, which keeps the in-flight counts of `view` up to date."""
        self.view = view
        self._requests: dict[InFlightRequest, None] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, tokens: int, is_counted: bool, prompt: int = 0) -> InFlightRequest:
        """Add a request of `prompt` prompt tokens, of which `tokens` are not cached.

        `is_counted` is True if the counts of the view include the request already.
        """
        request = InFlightRequest(tokens, prompt)
        self._requests[request] = None
        if not is_counted:
            self.view.in_flight += 1
            self.view.in_flight_tokens += tokens
        return request

    def remove_below(self, slot: float) -> None:
        """Remove the requests in slots below `slot`, which the replica's state now includes."""
        for request in [request for request in self._requests if request.slot < slot]:
            self.remove(request)

    def remove(self, request: InFlightRequest) -> None:
        """Remove a request. May be called more than once."""
        if request in self._requests:
            del self._requests[request]
            view = self.view
            view.in_flight = max(view.in_flight - 1, 0)
            view.in_flight_tokens = max(view.in_flight_tokens - request.tokens, 0)

    def clear(self) -> None:
        for request in list(self._requests):
            self.remove(request)
