"""The arithmetic, and the three that keep it: in one dict, in shared memory, in a real Valkey."""

import random
from collections import Counter

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmops.gateway.ratelimit import buckets
from llmops.gateway.ratelimit.buckets import Limit, LimitRequest, Settlement, advance_bucket, decide
from llmops.gateway.ratelimit.headers import format_duration, openai_headers, tightest_levels
from llmops.gateway.ratelimit.memory import InMemoryLimiter
from llmops.gateway.ratelimit.output_length import OutputLengthEstimate
from tests.limits.conftest import shared
from tests.support.waiting import Clock

FREE = buckets.UNLIMITED


def refilled(level: float, stamp: float, now: float, limit: int) -> tuple[float, float]:
    """Return the level of a rate that had `level` at `stamp`, and the time of the new level."""
    stamp, requests, *rest = advance_bucket((stamp, level, 10 * level, 7, 1), Limit("a", limit, 10 * limit), now)
    assert rest == [pytest.approx(10 * requests), 7, 1]
    return requests, stamp


def test_a_bucket_refills_without_steps_up_to_its_limit():
    for now, level in ((100.5, 0.5), (160.0, 60), (1e6, 60)):
        assert refilled(0, 100.0, now, 60) == (level, now)


def test_debt_is_paid_back_first():
    assert refilled(-30, 0.0, 20.0, 60) == (-10, 20.0)


@pytest.mark.parametrize(("back", "dated"), [(0.5, 100.0), (1.0, 100.0), (3600.0, 100.0 - 3600)])
def test_a_clock_that_goes_back_neither_refills_nor_stops_refilling(back, dated):
    assert refilled(5, 100.0, 100.0 - back, 60) == (5, dated)
    assert refilled(5, dated, dated + 2, 60) == (7, dated + 2)


def test_a_limit_that_was_lowered_holds_at_once():
    assert refilled(1000, 0.0, 0.0, 10) == (10, 0.0)


def test_what_is_not_limited_is_never_short_and_what_becomes_so_is_full():
    left = advance_bucket((0.0, FREE, -5.0, 0, 0), Limit("a"), 1e-9)
    assert left[1] == FREE
    assert left[2] > 1e280
    assert advance_bucket(left, Limit("a", 60, 600), 1e-9) == (1e-9, 60, 600, 0, 0)


@pytest.mark.parametrize(("period", "spent"), [(20, 7), (21, 7), (22, 0)])
def test_what_was_spent_is_of_the_latest_period(period, spent):
    """A gateway whose clock is behind neither brings the last one back nor begins this one anew."""
    left = advance_bucket((0.0, 1, 1, 7, 21), Limit("a", 1, 1, period=period), 0.0)
    assert left == (0.0, 1, 1, spent, max(period, 21))


def test_all_or_none_and_the_longest_wait():
    bounds, asks = [Limit("a", 60, 600), Limit("b", tokens=6000)], [LimitRequest(1, 100), LimitRequest(1, 50)]
    for requests, tokens, others, decision in (
        (0.75, 70, 6000, (0, "tokens", 3.0)), (0.75, 100, 6000, (0, "requests", 0.25)), (1, 100, 0, (1, "tokens", 0.5)),
    ):  # fmt: skip
        levels = [(requests, tokens, FREE, FREE), (FREE, others, FREE, FREE)]
        assert decide(bounds, asks, levels) == (levels, 0, *decision)
    allowed = decide(bounds, asks, [(1, 100, FREE, FREE), (FREE, 6000, FREE, FREE)])
    assert (allowed.lacking, allowed.left) == (None, [(0, 0, FREE, FREE), (FREE, 5950, FREE, FREE)])


def test_waiting_as_long_as_told_is_enough():
    bound, ask = [Limit("a", 7)], [LimitRequest(3)]
    wait = decide(bound, ask, [(0.1, FREE, FREE, FREE)]).wait
    assert decide(bound, ask, [(refilled(0.1, 0.0, wait, 7)[0], FREE, FREE, FREE)]).lacking is None


def test_more_than_a_bucket_holds_is_given_by_a_full_one_as_debt():
    bound, ask = [Limit("a", tokens=100)], [LimitRequest(tokens=300)]
    assert decide(bound, ask, [(FREE, 99.5, FREE, FREE)]).wait == pytest.approx(0.3)
    assert decide(bound, ask, [(FREE, 100, FREE, FREE)]).left == [(FREE, -200, FREE, FREE)]


def test_places_are_free_soon_and_money_is_not():
    bound = [Limit("a", places=2, money=100)]
    asked = [LimitRequest(0, 0, 1, 50, 10)]
    assert decide(bound, asked, [(FREE, FREE, 0, 100)])[2:] == (0, "places", buckets.SLOT_RETRY_DELAY)
    assert decide(bound, asked, [(FREE, FREE, 2, 9)])[2:] == (0, "money", buckets.NO_WAIT_HELPS)
    assert decide(bound, asked, [(FREE, FREE, 2, 10)]).money == 10
    allowed = decide(bound, asked, [(FREE, FREE, 2, 20.5)])
    assert (allowed.lacking, allowed.wait, allowed.money, allowed.left) == (None, 0.0, 20, [(FREE, FREE, 1, 0.5)])


def test_of_two_budgets_the_smaller_rest_is_taken_from_both():
    bounds, asks = [Limit("a", money=100), Limit("b", money=100)], [LimitRequest(money=50, least=10)] * 2
    allowed = decide(bounds, asks, [(FREE, FREE, FREE, 90), (FREE, FREE, FREE, 30)])
    assert (allowed.money, [left[3] for left in allowed.left]) == (30, [60, 0])


def test_money_that_was_overspent_pays_for_nothing_but_what_is_free():
    bound = [Limit("a", money=100)]
    assert decide(bound, [LimitRequest(money=10)], [(FREE, FREE, FREE, 0)]).money == 0
    assert decide(bound, [LimitRequest(money=10)], [(FREE, FREE, FREE, -1)]).wait == buckets.NO_WAIT_HELPS
    assert decide(bound, [LimitRequest()], [(FREE, FREE, FREE, -1)]) == ([(FREE, FREE, FREE, -1)], 0, None, "", 0.0)


def test_debt_stops_nobody_who_asks_for_something_else():
    bound = [Limit("a", 60, 600, 1)]
    assert decide(bound, [LimitRequest(1)], [(1, -50, -1, FREE)]).left == [(0, -50, -1, FREE)]
    assert decide(bound, [LimitRequest(1, 0, 1)], [(1, -50, 1, FREE)]).left == [(0, -50, 0, FREE)]


def test_a_share_of_each_limit_but_not_of_money():
    """A rate is divided exactly, also below one; of places each share has at least one."""
    share = Limit("a", 60, FREE, 2, 100, 7).share(3)
    assert Limit("a", 1).share(4).requests == 0.25
    assert [share.name, share.requests, share.tokens, share.places] == ["a", 20, FREE, 1]
    assert (share.money, share.period) == (100, 7)


def test_expected_is_the_ninetieth_percentile_of_the_last_answers():
    """numpy says which that is."""
    expected, draw, lengths = OutputLengthEstimate(), random.Random(5), []
    assert expected.of("m") == 256
    for _ in range(450):
        lengths.append(draw.randrange(1000))
        expected.note("m", lengths[-1])
        assert expected.of("m") == max(numpy.quantile(lengths[-200:], 0.9, method="higher"), 256)
    assert expected.of("other") == 256


# -- headers ---------------------------------------------------------------------------------------------------------


def told(headers) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in headers}


def test_the_tightest_limit_is_shown_in_openais_terms():
    bounds = [Limit("a", 60, 6000), Limit("b", 1000), Limit("c", places=1)]
    levels = tightest_levels(bounds, [(59, -40.0, FREE, FREE), (12, FREE, FREE, FREE), (FREE, FREE, 0, FREE)])
    requests, tokens = ("1000", "12", "59.28s"), ("6000", "0", "1m0.4s")
    names = [f"x-ratelimit-{kind}-{of}" for of in ("requests", "tokens") for kind in ("limit", "remaining", "reset")]
    assert told(openai_headers(levels)) == dict(zip(names, [*requests, *tokens], strict=True))


def test_what_is_not_limited_is_not_shown():
    assert list(tightest_levels([Limit("a", places=1)], [(FREE, FREE, 1, FREE)])) == []


@pytest.mark.parametrize("left", [60, 60.5])
def test_what_is_full_needs_no_time(left):
    levels = [*tightest_levels([Limit("a", tokens=60)], [(FREE, left, FREE, FREE)])]
    assert told(openai_headers(levels))["x-ratelimit-reset-tokens"] == "0ms"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.017, "17ms"), (0.999, "999ms"), (1, "1s"), (1.5, "1.5s"), (59.999, "59.999s"), (60, "1m0s"),
     (61.25, "1m1.25s"), (360, "6m0s")],
)  # fmt: skip
def test_durations(seconds, text):
    assert format_duration(seconds) == text


# -- properties ------------------------------------------------------------------------------------------------------

LIMIT = 100
BOUND = [Limit("a", LIMIT)]


STEP = st.tuples(st.floats(0, 30), st.integers(1, 80), st.floats(0, 1), st.integers(0, 5))


@given(st.lists(STEP, min_size=1, max_size=60))
def test_what_was_used_is_never_more_than_limit_and_refill(steps):
    """Reservations and refunds in any order: after each, what is used and reserved since the start fits."""

    clock = Clock()
    limiter = InMemoryLimiter(clock)
    used, open_ = 0, []
    for wait, amount, share, later in steps:
        clock.now += wait
        if limiter.reserve_now(BOUND, [LimitRequest(amount)]).decision.lacking is None:
            used += amount
            open_.append((amount, round(amount * share)))
        if open_ and later < 3:
            reserved, truth = open_.pop(later % len(open_))
            limiter.settle(BOUND, Settlement(truth - reserved))
            used += truth - reserved
        assert used <= LIMIT + clock.now * LIMIT / 60 + 1e-3


def test_what_is_given_back_late_is_not_more_than_a_full_bucket():
    """Neither with the next reservation nor by itself."""
    clock = Clock()
    limiter = InMemoryLimiter(clock)
    for settle in (lambda: None, limiter.beat):
        assert limiter.reserve_now(BOUND, [LimitRequest(50)]).decision.lacking is None
        clock.now += 60
        limiter.settle(BOUND, Settlement(-50))
        settle()
        assert limiter.reserve_now(BOUND, [LimitRequest()]).decision.left[0][0] == LIMIT


@given(st.lists(st.integers(1, 30), min_size=30, max_size=200))
@settings(max_examples=30)
def test_who_waits_as_told_uses_all_of_it(amounts):
    clock = Clock()
    limiter = InMemoryLimiter(clock)
    used = 0
    for amount in amounts:
        while (decision := limiter.reserve_now(BOUND, [LimitRequest(amount)]).decision).lacking is not None:
            clock.now += decision.wait
        used += amount
    # no caller waits where something is left: all of it is used, but for what the last one left
    assert clock.now == 0 or used == pytest.approx(LIMIT + clock.now * LIMIT / 60, abs=1e-3)


def a_bound(name: str, day: int, late: int = 0) -> Limit:
    """`a` has every limit, `b` and `c` only some. `late`: days by which a gateway's clock is."""
    limits = {"a": (100, 1000, 2, 500), "b": (50, FREE, 2, FREE), "c": (FREE, 500, FREE, 500)}[name]
    return Limit(name, *limits, day - late)


def an_ask(draw: random.Random) -> LimitRequest:
    """Rates in steps that no refill crosses while the test runs."""
    money = draw.choice([0, draw.randint(20, 200)])
    requests, tokens = draw.choice([0, 0, 25, 50, 75]), draw.choice([0, 0, 250])
    return LimitRequest(requests, tokens, draw.randint(0, 1), money, min(money, 15))


async def test_valkey_decides_as_the_table_does(redis_url, prefix):
    draw, seen, day = random.Random(16), Counter(), 20
    open_: list[tuple[list[Limit], LimitRequest, int]] = []
    embedded = InMemoryLimiter(Clock())
    async with shared(redis_url, prefix) as valkey:
        for _ in range(300):
            if draw.random() < 0.05:
                # what was settled belongs to the day on which it is written
                embedded.beat()
                await valkey.reserve((), ())
                day += 1
            bounds = [a_bound(name, day) for name in draw.sample("abc", draw.randint(1, 3))]
            asks = [an_ask(draw)] * len(bounds)
            mine, theirs = embedded.reserve_now(bounds, asks).decision, await valkey.reserve(bounds, asks)
            assert theirs.by is valkey
            assert (theirs.decision.money, theirs.decision.lacking is None) == (mine.money, mine.lacking is None)
            # of two that lack alike, a moment decides which takes longer
            assert theirs.decision.wait == pytest.approx(mine.wait, abs=12)
            for left, there in zip(mine.left, theirs.decision.left, strict=True):
                assert (there, there[2:]) == (pytest.approx(left, abs=240), pytest.approx(left[2:]))
            seen[mine.of] += 1
            if mine.lacking is None:
                open_.append((bounds, asks[0], mine.money))
            if open_ and draw.random() < 0.4:
                bounds, ask, money = open_.pop(draw.randrange(len(open_)))
                beyond = draw.choice([-50, -25, 25]), draw.choice([-250, 0])
                # of an answer that began on the day before it depends on who asked last for which day it counts
                spent = draw.randint(0, money // 4) if bounds[0].period == day else 0
                change = Settlement(*beyond, -ask.places, -money, spent)
                embedded.settle(bounds, change)
                valkey.settle(bounds, change)
                # what waits for a reservation of the next day counts for that
                if draw.random() < 0.5 or min(bound.period for bound in bounds) < day:
                    embedded.beat()
            if draw.random() < 0.05:
                known = a_bound(draw.choice("abc"), day, draw.randint(0, 1)), draw.randint(0, 300)
                embedded.spent(*known)
                valkey.spent(*known)
    assert set(seen) == {"", "requests", "tokens", "places", "money"}
