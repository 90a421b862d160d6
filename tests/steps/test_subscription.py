"""The engine's side of a step stream: whatever happens to the connection, each token arrives once and in order."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmops_engine.steps import subscription as steps


class Gateway:
    """Receives steps while its connection lives, and remembers the last one that it saw."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.log_probs: dict[int, list[float]] = defaultdict(list)
        self.last = 0
        self.finished: str | None = None
        self.connected = True
        self.sent = 0

    def send(self, step) -> None:
        self.sent += 1
        if not self.connected:
            return
        assert step.index == self.last + 1
        self.last = step.index
        start = 0
        for slot, _, count, _ in step.entries.tolist():
            self.tokens[slot] += step.tokens[start : start + count].tolist()
            if step.log_probs is not None:
                self.log_probs[slot] += step.log_probs[start : start + count].tolist()
            start += count

    def finish(self, error: str = "") -> None:
        self.finished = error

    def is_cancelled(self) -> bool:
        return not self.connected


def attached(**options):
    """A subscription, and the gateway whose it is."""
    subscription, gateway = steps.Subscription(**options), Gateway()
    assert subscription.attach(gateway, 0, 0.0)
    return subscription, gateway


def give(subscription, *tokens: int) -> None:
    """Tokens of a request, each in a step of its own."""
    for token in tokens:
        subscription.add(0, 0, [token], [])
        subscription.flush()


@settings(max_examples=60)
@given(st.data())
def test_no_token_is_lost_or_doubled(data) -> None:
    """Steps, acknowledgements, breaks and resumptions in any order; a window small enough to close often."""
    subscription, gateway = attached(window=data.draw(st.integers(1, 4)))
    expected: dict[int, list[int]] = defaultdict(list)
    number = 0
    for action in data.draw(st.lists(st.sampled_from(["step", "step", "step", "ack", "break", "resume"]), max_size=40)):
        if action == "step":
            for slot in data.draw(st.lists(st.integers(0, 3), unique=True)):
                number += 1
                expected[slot].append(number)
                subscription.add(slot, 0, [number], [])
            subscription.flush()
        elif action == "ack" and gateway.connected:
            subscription.acknowledge(gateway.last, 0.0)
            subscription.flush()
        elif action == "break":
            gateway.connected = False
        elif action == "resume":
            gateway.connected = True
            assert subscription.attach(gateway, gateway.last, 0.0)
            subscription.flush()
    gateway.connected = True
    assert subscription.attach(gateway, gateway.last, 0.0)
    for _ in range(10):
        subscription.acknowledge(gateway.last, 0.0)
        subscription.flush()
    assert gateway.tokens == expected


def test_a_gateway_that_stalls_gets_at_most_a_window_and_then_everything_merged() -> None:
    subscription, gateway = attached(window=4)
    for token in range(100):
        subscription.add(7, 0, [token], [-0.5])
        subscription.flush()
    assert gateway.sent == 4
    subscription.acknowledge(4, 0.0)
    subscription.flush()
    assert (gateway.sent, gateway.tokens[7], gateway.log_probs[7]) == (5, list(range(100)), [-0.5] * 100)


def test_entries_without_log_probs_are_padded_so_that_positions_agree() -> None:
    subscription, gateway = attached()
    subscription.add(1, 0, [10, 11], [])
    subscription.add(2, 0, [20], [-1.5])
    subscription.flush()
    assert gateway.log_probs == {1: [0.0, 0.0], 2: [-1.5]}


def test_a_broken_stream_is_given_up_after_the_grace_time_and_not_before() -> None:
    subscription, gateway = steps.Subscription(grace=5.0), Gateway()
    subscription.attach(gateway, 0, 100.0)
    gateway.connected = False
    subscription.check(101.0)
    assert gateway.finished == ""
    look(subscription, 101.0, 105.9)
    assert not subscription.lost
    subscription.check(106.1)
    assert subscription.lost


def look(subscription, start: float, end: float) -> None:
    """Twice a second; a step of an engine takes less."""
    while start < end:
        start = min(start + 0.5, end)
        subscription.check(start)


@pytest.mark.parametrize("connected", [True, False])
def test_an_engine_that_was_held_up_gives_up_nobody_for_it(connected) -> None:
    subscription, gateway = attached(window=1, grace=5.0)
    give(subscription, 1)
    gateway.connected = connected
    subscription.check(1.0)
    subscription.check(60.0)
    assert not subscription.lost
    # of the 59 seconds it has seen one
    heard = 0.0 if connected else 1.0
    look(subscription, 60.0, 63.0 + heard)
    assert not subscription.lost
    subscription.check(63.1 + heard)
    assert subscription.lost


def test_a_silent_gateway_is_given_up_only_while_steps_wait_for_it() -> None:
    subscription, gateway = attached(window=1, grace=5.0)
    look(subscription, 0.0, 100.0)
    assert not subscription.lost
    subscription.acknowledge(0, 100.0)
    give(subscription, 1)
    look(subscription, 100.0, 104.9)
    assert not subscription.lost
    subscription.check(105.1)
    assert subscription.lost
    assert gateway.finished.startswith("subscription: dropped")


def test_what_is_still_to_be_sent_keeps_a_drained_subscription_open() -> None:
    subscription, gateway = attached(window=1)
    assert subscription.is_settled
    give(subscription, 0, 1, 2)
    assert not subscription.is_settled
    subscription.acknowledge(1, 0.0)
    subscription.flush()
    assert gateway.tokens[0] == [0, 1, 2]
    assert subscription.is_settled
    # its stream broke before it said that it got the last step: it may come back for it
    subscription.detach(0.0)
    assert not subscription.is_settled


def test_resuming_from_steps_that_are_gone_is_refused() -> None:
    subscription, gateway = attached()
    give(subscription, 0, 1, 2)
    subscription.acknowledge(2, 0.0)
    assert not subscription.attach(Gateway(), 1, 0.0)
    assert not subscription.attach(Gateway(), 4, 0.0)
    assert subscription.attach(gateway, 3, 0.0)


def test_a_submission_that_is_said_twice_is_taken_once() -> None:
    subscription = steps.Subscription()
    assert [subscription.claim(slot) for slot in (0, 1, 1, 0, 2)] == [True, True, False, False, True]
