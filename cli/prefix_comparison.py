"""The comparison of two prompts: their differences, and the effect on the prefix cache."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

#: Number of consecutive equal tokens from which on two prompts agree again. Shorter runs are
#: chance.
AGREEING_TOKENS = 16


class PromptDifference(NamedTuple):
    """A part in which a prompt differs from an earlier one.

    Attributes:
        start: The index of the prompt's token at which the part begins.
        end: The index of the prompt's token from which on the prompts agree again.
        earlier_start: The index in the earlier prompt that corresponds to `start`.
        earlier_end: The index in the earlier prompt that corresponds to `end`.
        equal_before: The number of equal tokens before this part, without earlier differences.
        equal_after: The number of tokens that would be equal without this and all earlier
            differences.
    """

    start: int
    end: int
    earlier_start: int
    earlier_end: int
    equal_before: int
    equal_after: int


def compare_prompts(earlier: Sequence[int], prompt: Sequence[int]) -> list[PromptDifference]:
    """Return the parts of a prompt that differ from an earlier prompt, in order.

    The part after the end of the shorter prompt is not a difference. If the prompts never agree
    again, the last difference reaches to the ends of both.
    """
    places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for at in range(len(earlier) - AGREEING_TOKENS + 1):
        places[tuple(earlier[at : at + AGREEING_TOKENS])].append(at)
    found: list[PromptDifference] = []
    one = two = equal = 0
    while True:
        run = _equal_tokens(earlier, one, prompt, two)
        one, two, equal = one + run, two + run, equal + run
        if found:
            found[-1] = found[-1]._replace(equal_after=equal)
        if one == len(earlier) or two == len(prompt):
            return found
        later_one, later_two = _next_agreement(places, one, prompt, two) or (len(earlier), len(prompt))
        found.append(PromptDifference(two, later_two, one, later_one, equal, equal))
        one, two = later_one, later_two


# common_prefix_length would copy the rest of both prompts at each of their differences
def _equal_tokens(earlier: Sequence[int], one: int, prompt: Sequence[int], two: int) -> int:
    most = min(len(earlier) - one, len(prompt) - two)
    return next((at for at in range(most) if earlier[one + at] != prompt[two + at]), most)


def _next_agreement(
    places: dict[tuple[int, ...], list[int]], one: int, prompt: Sequence[int], two: int
) -> tuple[int, int] | None:
    for at in range(two, len(prompt) - AGREEING_TOKENS + 1):
        known = places.get(tuple(prompt[at : at + AGREEING_TOKENS]), [])
        later = bisect_left(known, one)
        if later < len(known):
            return known[later], at
    return None
