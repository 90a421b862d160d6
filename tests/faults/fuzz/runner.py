"""Sending cases and judging the answers."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import httpx

from tests.faults.fuzz.base import Case, Target
from tests.faults.fuzz.families import FAMILIES
from tests.faults.fuzz.judge import problem_of

PATIENCE = 30.0  # seconds, after which a client leaves


@dataclass
class Findings:
    """The results of a fuzzing run.

    Attributes:
        statuses: Number of answers of each status.
        violations: Descriptions of invalid answers.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


def some(family: str, target: Target, count: int, seed: int = 0) -> Iterator[Case]:
    """`count` cases of a family; the same for the same seed."""
    return islice(FAMILIES[family](target, random.Random(seed)), count)


async def fuzz(client: httpx.AsyncClient, cases: Iterable[Case], parallel: int = 16) -> Findings:
    """Send `cases`, `parallel` at a time."""
    findings, source = Findings(), iter(cases)

    async def work() -> None:
        for case in source:
            await _send(client, case, findings)

    await asyncio.gather(*(work() for _ in range(parallel)))
    alive = await client.get("/health/live")
    if alive.status_code != 200:
        findings.violations.append(f"the gateway is not alive: {alive.status_code}")
    return findings


async def _send(client: httpx.AsyncClient, case: Case, findings: Findings) -> None:
    try:
        answer = await asyncio.wait_for(case.send(client), PATIENCE)
    except TimeoutError:
        # a body without a token limit is valid and its answer takes minutes; meanwhile the gateway is checked
        return
    except httpx.HTTPError as error:
        findings.violations.append(f"{case.path}: {error!r} for {case.body[:2000]!r}")
        return
    if answer is None:
        return
    findings.statuses[answer.status_code] += 1
    problem = problem_of(answer, case.refusals)
    if problem:
        findings.violations.append(f"{case.path}: {problem} for {case.body[:2000]!r}")
