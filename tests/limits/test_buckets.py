"""The arithmetic, and the three that keep it: in one dict, in shared memory, in a real Valkey."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limits_conftest import Clock, shared

from llmops.gateway.callers.limits.buckets import (
    BUSY,
    MONEY,
    NEVER,
    PLACES,
    RATE,
    Change,
    Want,
    decide,
    divided,
    refilled,
)
from llmops.gateway.callers.limits.embedded import Embedded
from llmops.gateway.callers.limits.expected import Expected
from llmops.gateway.callers.limits.headers import Level, anthropic_headers, duration, openai_headers


def rate(limit, amount, key="a"):
    return Want(RATE, key, limit, amount)


def test_a_bucket_refills_without_steps_up_to_its_limit():
    assert refilled(0, 100.0, 100.5, 60) == (0.5, 100.5)
    assert refilled(0, 100.0, 160.0, 60) == (60, 160.0)
    assert refilled(0, 100.0, 1e6, 60) == (60, 1e6)


def test_debt_is_paid_back_first():
    assert refilled(-30, 0.0, 20.0, 60) == (-10, 20.0)


@pytest.mark.parametrize(("back", "dated"), [(0.5, 100.0), (3600.0, 100.0 - 3600)])
def test_a_clock_that_goes_back_neither_refills_nor_stops_refilling(back, dated):
    assert refilled(5, 100.0, 100.0 - back, 60) == (5, dated)
    assert refilled(5, dated, dated + 2, 60) == (7, dated + 2)


def test_a_limit_that_was_lowered_holds_at_once():
    assert refilled(1000, 0.0, 0.0, 10) == (10, 0.0)


def test_all_or_none_and_the_longest_wait():
    wants = [rate(60, 1), rate(600, 100), rate(6000, 50)]
    refused = decide(wants, [0.75, 70, 6000])
    assert (refused.lacking, refused.wait, refused.given) == (1, 3.0, ())
    assert refused.left == (0.75, 70, 6000)
    allowed = decide(wants, [1, 100, 6000])
    assert (allowed.lacking, allowed.left, allowed.given) == (None, (0, 0, 5950), (1, 100, 50))


def test_waiting_as_long_as_told_is_enough():
    want = rate(7, 3)
    wait = decide([want], [0.1]).wait
    assert decide([want], [refilled(0.1, 0.0, wait, 7)[0]]).lacking is None


def test_more_than_a_bucket_holds_is_given_by_a_full_one_as_debt():
    assert decide([rate(100, 300)], [99.5]).wait == pytest.approx(0.3)
    assert decide([rate(100, 300)], [100]).left == (-200,)


def test_places_are_free_soon_and_money_is_not():
    assert decide([Want(PLACES, "a", 2, 1)], [0]).wait == BUSY
    assert decide([Want(MONEY, "a", 100, 50, 10)], [9]).wait == NEVER
    assert decide([Want(MONEY, "a", 100, 50, 10)], [10]).given == (10,)
    allowed = decide([Want(PLACES, "a", 2, 1), Want(MONEY, "a", 100, 50, 10)], [2, 20.5])
    assert (allowed.lacking, allowed.wait, allowed.given, allowed.left) == (None, 0.0, (1, 20), (1, 0.5))


def test_money_that_was_overspent_pays_for_nothing_even_where_nothing_is_needed():
    assert decide([Want(MONEY, "a", 100, 10)], [0]).given == (0,)
    assert decide([Want(MONEY, "a", 100, 10)], [-1]).wait == NEVER


def test_a_share_of_each_limit_but_not_of_money():
    wants = [rate(60, 1), Want(PLACES, "a", 2, 1), Want(MONEY, "a", 100, 5)]
    assert [want.limit for want in divided(wants, 3)] == [20, 1, 100]
    assert divided(wants, 1) == wants


def test_expected_is_the_ninetieth_percentile_of_the_last_answers():
    """numpy says which that is."""
    expected, draw, lengths = Expected(), random.Random(5), []
    assert expected.of("m") == 256
    for _ in range(450):
        lengths.append(draw.randrange(1000))
        expected.note("m", lengths[-1])
        assert expected.of("m") == numpy.quantile(lengths[-200:], 0.9, method="higher")
    assert expected.of("other") == 256


# -- headers ---------------------------------------------------------------------------------------------------------


def test_the_tightest_limit_is_shown_in_openais_terms():
    levels = [Level("requests", 60, 59), Level("requests", 1000, 12), Level("tokens", 6000, -40.0)]
    assert openai_headers(levels) == {
        "x-ratelimit-limit-requests": "1000",
        "x-ratelimit-remaining-requests": "12",
        "x-ratelimit-reset-requests": "59.28s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m0.4s",
    }


def test_anthropics_clients_are_told_in_its_terms(noon):
    assert anthropic_headers([Level("requests", 60, 30), Level("tokens", 6000, -40.0)], noon) == {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "30",
        "anthropic-ratelimit-requests-reset": "2026-11-22T12:00:30Z",
        "anthropic-ratelimit-tokens-limit": "6000",
        "anthropic-ratelimit-tokens-remaining": "0",
        "anthropic-ratelimit-tokens-reset": "2026-11-22T12:01:00Z",
    }


@pytest.mark.parametrize("left", [60, 60.5])
def test_what_is_full_needs_no_time(left, noon):
    assert openai_headers([Level("tokens", 60, left)])["x-ratelimit-reset-tokens"] == "0ms"
    assert anthropic_headers([Level("tokens", 60, left)], noon)["anthropic-ratelimit-tokens-reset"].endswith(
        "12:00:00Z"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.017, "17ms"), (0.999, "999ms"), (1, "1s"), (1.5, "1.5s"), (59.999, "59.999s"), (60, "1m0s"),
     (61.25, "1m1.25s"), (360, "6m0s")],
)  # fmt: skip
def test_durations(seconds, text):
    assert duration(seconds) == text


# -- properties ------------------------------------------------------------------------------------------------------

LIMIT = 100


@contextmanager
def table_on(clock: Clock) -> Iterator[Embedded]:
    limiter = Embedded(":memory:", clock)
    yield limiter
    asyncio.run(limiter.close())


@asynccontextmanager
async def kept() -> AsyncIterator[Embedded]:
    limiter = Embedded(":memory:", Clock())
    yield limiter
    await limiter.close()


STEPS = st.lists(
    st.tuples(st.floats(0, 30), st.integers(1, 80), st.floats(0, 1), st.integers(0, 5)), min_size=1, max_size=60
)


@given(STEPS)
def test_what_was_used_is_never_more_than_limit_and_refill(steps):
    """Reservations and refunds in any order: after each, what is used and reserved since the start fits."""
    clock = Clock()
    with table_on(clock) as limiter:
        used, open_ = 0, []
        for wait, amount, share, later in steps:
            clock.now += wait
            if limiter.reserve_now([rate(LIMIT, amount)]).decision.lacking is None:
                used += amount
                open_.append((amount, round(amount * share)))
            if open_ and later < 3:
                reserved, truth = open_.pop(later % len(open_))
                limiter.settle([Change(RATE, "a", LIMIT, 0, truth - reserved)])
                used += truth - reserved
            assert used <= LIMIT + clock.now * LIMIT / 60 + 1e-3


@given(st.lists(st.integers(1, 30), min_size=30, max_size=200))
@settings(max_examples=30)
def test_who_waits_as_told_uses_all_of_it(amounts):
    clock = Clock()
    with table_on(clock) as limiter:
        used = 0
        for amount in amounts:
            while (decision := limiter.reserve_now([rate(LIMIT, amount)]).decision).lacking is not None:
                clock.now += decision.wait
            used += amount
        # nobody waits where something is left: all of it is used, but for what the last one left
        assert clock.now == 0 or used == pytest.approx(LIMIT + clock.now * LIMIT / 60, abs=1e-3)


def a_want(draw: random.Random) -> Want:
    """Rates in steps that no refill crosses while the test runs."""
    key = draw.choice("abc")
    return draw.choice(
        [
            rate(draw.choice([50, 100]), draw.choice([0, 25, 50, 75]), key),
            Want(PLACES, key, 2, 1),
            Want(MONEY, key, 500, draw.randint(20, 200), draw.randint(0, 20)),
        ]
    )


def an_end(want: Want, took: int, draw: random.Random) -> Change:
    if want.kind == RATE:
        return Change(RATE, want.key, want.limit, 0, draw.choice([-25, 0, 25]))
    return Change(want.kind, want.key, want.limit, took, draw.randint(0, took) if want.kind == MONEY else 0)


async def test_valkey_decides_as_the_table_does(redis_url, prefix):
    draw, seen = random.Random(14), Counter()
    open_: list[tuple[list[Want], tuple[int, ...]]] = []
    async with kept() as embedded, shared(redis_url, prefix) as valkey:
        for _ in range(300):
            unique = {(want.kind, want.key): want for want in (a_want(draw) for _ in range(draw.randint(1, 4)))}
            wants = list(unique.values())
            mine, theirs = embedded.reserve_now(wants).decision, await valkey.reserve(wants)
            assert theirs.by is valkey
            assert theirs.decision.given == mine.given
            assert (theirs.decision.lacking is None) == (mine.lacking is None)
            # of two that lack alike, a moment decides which takes longer
            assert theirs.decision.wait == pytest.approx(mine.wait, abs=12)
            assert theirs.decision.left == pytest.approx(mine.left, abs=24)
            seen[mine.lacking if mine.lacking is None else wants[mine.lacking].kind] += 1
            if mine.lacking is None:
                open_.append((wants, mine.given))
            if open_ and draw.random() < 0.5:
                ended = open_.pop(draw.randrange(len(open_)))
                changes = [an_end(want, took, draw) for want, took in zip(*ended, strict=True)]
                embedded.settle(changes)
                valkey.settle(changes)
    assert {None, RATE, PLACES, MONEY} == set(seen)
