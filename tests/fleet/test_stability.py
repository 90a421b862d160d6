"""Prompts whose beginning changes."""

import random
import struct

from llmops.gateway.routing.placement.unstable_prompts import UnstablePromptDetector, divergence_point

HEAD, BODY = list(range(12)), list(range(5000, 6000))


def packed(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def stamped(number: int, size: int = 3) -> bytes:
    return packed([*HEAD, *[70_000 + number * 16 + at for at in range(size)], *BODY])


def test_the_token_at_which_two_prompts_part_and_go_on_alike() -> None:
    assert divergence_point(stamped(1), stamped(2)) == 12
    # of another length too: a clock without leading zeros, another user's name
    assert divergence_point(stamped(1, 3), stamped(2, 7)) == 12
    assert divergence_point(stamped(1, 40), stamped(2, 30)) == 12


def test_what_looks_alike_between_two_tokens_is_passed_over() -> None:
    alike = [0x01010101] * 300
    assert divergence_point(packed([*HEAD, 5, 6, *alike]), packed([*HEAD, 7, 0x01010170, *alike])) == 12


def test_prompts_that_go_on_are_as_they_should_be() -> None:
    turn = packed([*HEAD, *BODY])
    assert divergence_point(turn, turn) is None
    assert divergence_point(turn, turn + packed([1, 2, 3] * 50)) is None
    rng = random.Random(1)
    one, other = ([*HEAD, *(rng.randrange(10**5) for _ in range(500))] for _ in range(2))
    assert divergence_point(packed(one), packed(other)) is None
    assert divergence_point(b"", turn) is None


def test_one_that_mended_its_prompts_is_told_of_again() -> None:
    watch = UnstablePromptDetector()
    told = 0
    for start in (0, 1000):
        for number in range(60):
            told += watch.record("acme", stamped(start + number)) is not None
        for _ in range(60):
            told += watch.record("acme", packed([*HEAD, *BODY])) is not None
    assert told == 2


def test_many_tenants_take_no_more_memory_than_the_last_of_them() -> None:
    watch = UnstablePromptDetector(tenants=10)
    for number in range(100):
        for _ in range(30):
            watch.record(f"tenant-{number}", packed(BODY))
    assert set(watch._seen) == {f"tenant-{number}" for number in range(90, 100)}


def test_the_prompts_of_all_tenants_take_32_mib() -> None:
    """Before the fix, long prompts of 10,000 tenants, or of as many addresses without keys, took 10 GB."""
    watch = UnstablePromptDetector()
    for number in range(600):
        watch.record(f"tenant-{number}", bytes(2**20 - number))
    assert sum(len(one.last) for one in watch._seen.values()) <= 2**25
