"""Places that no client can take all of."""

from llmops.gateway.ratelimit.fairness import FairShares


def taken(shares: FairShares, share: str) -> int:
    """Return the number of slots that `share` gets before it is rejected."""
    count = 0
    while shares.take(share):
        count += 1
    return count


def test_an_address_gets_half_of_what_is_left_a_key_half_of_that_and_free_places_come_first():
    for shares, names, found in [
        (FairShares(96), "abcdef", [48, 24, 12, 6, 3, 2]),
        (FairShares(90), ("a/one", "a/two", "b"), [30, 10, 25]),
        # all four free ones and half of two; all ten and half of 96
        (FairShares(2, free=4), "a", [5]),
        (FairShares(96, free=10), "a", [58]),
    ]:
        assert [taken(shares, name) for name in names] == found
    turns = FairShares(90)
    assert [turns.take(name) for _ in range(90) for name in "ab"].count(True) == 60, "a third each"
