"""The comparison of the greedy answers of a version's replicas, which should be equal."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

#: Mean similarity from which two replicas count as equal. Copies of a version stay above 0.8 also
#: where batches change roundings; a corrupted one is below 0.3.
AGREEMENT = 0.5

#: The answers of one replica to the same prompts, as token ids. None stands for a failed request.
Answers = Sequence[Sequence[int] | None]


def similarity(one: Answers, other: Answers) -> float | None:
    """Return the mean share of a common beginning, or None if no prompt was answered by both."""
    shares = [_common_share(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return sum(shares) / len(shares) if shares else None


class ReplicaComparison(NamedTuple):
    """The result of a comparison.

    Attributes:
        outliers: Replicas that differ from a majority.
        agreed: True if there are several replicas and all of them are equal.
    """

    outliers: Collection[str]
    agreed: bool


def compare_replicas(answers: Mapping[str, Answers], reference: Answers | None) -> ReplicaComparison:
    """Compare the answers of a version's replicas.

    Two replicas that differ accuse each other, so that only answers from the past can decide.

    Args:
        answers: The answers by replica.
        reference: Answers of the same version on which its replicas agreed earlier, or None. They
            count as one more replica.
    """
    voters: dict[str | None, Answers] = {name: own for name, own in answers.items() if any(own)}
    replicas = len(voters)
    if reference is not None:
        voters[None] = reference
    agreeing = {
        name: sum((similarity(own, other) or 0.0) >= AGREEMENT for key, other in voters.items() if key != name)
        for name, own in voters.items()
    }
    majority = [name for name, count in agreeing.items() if 2 * (count + 1) > len(voters)]
    outliers = [name for name in voters if name is not None and name not in majority] if majority else []
    return ReplicaComparison(outliers, replicas > 1 and len(majority) == len(voters))


def _common_share(one: Sequence[int], other: Sequence[int]) -> float:
    longest = max(len(one), len(other))
    common = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return common / longest if longest else 1.0
