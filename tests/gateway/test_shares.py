"""Places that no client can take all of."""

from llmops.gateway.ratelimit.fairness import FairShares


def taken(shares: FairShares, share: str) -> int:
    """Return the number of slots that `share` gets before it is rejected."""
    count = 0
    while shares.take(share):
        count += 1
    return count


def test_one_address_gets_half_and_each_that_comes_later_half_of_what_is_left():
    shares = FairShares(96)
    assert [taken(shares, name) for name in "abcdef"] == [48, 24, 12, 6, 3, 2]


def test_two_that_take_turns_get_a_third_each():
    shares = FairShares(90)
    turns = [shares.take(name) for _ in range(90) for name in "ab"]
    assert turns.count(True) == 60


def test_a_key_gets_half_of_what_its_address_may_have():
    shares = FairShares(90)
    assert taken(shares, "a/one") == 30
    assert taken(shares, "a/two") == 10
    assert taken(shares, "b") == 25


def test_free_places_come_before_those_that_are_shared():
    """All four free ones and half of two; all ten and half of 96."""
    assert taken(FairShares(2, free=4), "a") == 5
    assert taken(FairShares(96, free=10), "a") == 58
