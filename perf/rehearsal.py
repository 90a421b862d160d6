"""The load and the report of `llmops rollout rehearse`.

A steady load of greedy answers runs through a whole roll-out. The answer to each request lists its
tokens, so that lost and repeated tokens can be counted.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from llmops.gateway.routing.quality.golden_prompts import GoldenPrompt
from llmops.perf.planted_faults import PLANTED_ERROR

#: Name of the new version.
CANDIDATE = "candidate"
#: Number of tokens of each answer: enough to look like words, few enough for hundreds of answers.
ANSWER_TOKENS = 12
#: Minimum seconds of a window in which completed and offered requests are compared.
WINDOW = 30.0
#: Seconds between the starts of two windows: a fraction of a window, so that windows overlap and a
#: short loss is not divided between two of them.
WINDOW_STEP = 5.0
#: Minimum number of requests of a window. At a low rate, a few requests in progress would otherwise
#: look like a loss.
WINDOW_REQUESTS = 40
#: Number of users of the closed loop that measures a capacity: enough to keep a small engine busy.
CAPACITY_USERS = 8
#: Seconds of the closed loop that measures a capacity: enough for many short answers.
CAPACITY_SECONDS = 15.0
#: Number of golden prompts that are sent at the same time, because one after another would be slow.
QUALITY_USERS = 4
REQUEST_TIMEOUT = 120.0

_SUBJECTS = (
    *("the moon", "a bicycle", "the sea", "a library", "bread", "winter", "a bridge", "music", "a garden", "tea"),
    *("a train", "the sun", "a clock", "rain", "a mountain", "paper", "a horse", "glass", "a city", "sleep"),
)
_QUESTIONS = (
    "Describe {} to a child in one sentence.",
    "Write two sentences about {}.",
    "Why do people like {}?",
    "What is {} made of?",
    "Tell me a short story about {}.",
)


@dataclass
class RehearsedRequest:
    """The record of a request of the load. Times are in seconds of `time.time`."""

    started: float
    ended: float = 0.0
    version: str = ""
    error: str = ""
    tokens: int = 0


@dataclass
class RehearsalLoad:
    """A load on a gateway, and the records of its requests."""

    url: str
    model: str
    records: list[RehearsedRequest] = field(default_factory=list)

    async def measure_capacity(self) -> float:
        """Return the answers per second of a closed loop without other load."""
        async with self._client() as client:
            deadline = time.time() + CAPACITY_SECONDS
            found: list[RehearsedRequest] = []

            async def user(number: int) -> None:
                while time.time() < deadline:
                    found.append(await self._ask(client, f"capacity-{number}-{len(found)}", len(found)))

            started = time.time()
            await asyncio.gather(*map(user, range(CAPACITY_USERS)))
            good = [record for record in found if not record.error]
            return round(len(good) / (max((record.ended for record in good), default=started + 1) - started), 2)

    async def measure_quality(self, prompts: Sequence[GoldenPrompt]) -> float:
        """Return the mean score of the answers to golden prompts, from 0 to 1."""
        async with self._client() as client:
            limit = asyncio.Semaphore(QUALITY_USERS)

            async def ask(prompt: GoldenPrompt) -> float | None:
                body = self._body(prompt.prompt, prompt.max_tokens)
                async with limit:
                    answer = await client.post(f"{self.url}/v1/chat/completions", json=body)
                return prompt.score(answer.raise_for_status().json()["choices"][0]["message"]["content"])

            scores = [score for score in await asyncio.gather(*map(ask, prompts)) if score is not None]
        return round(sum(scores) / len(scores), 3)

    async def run(self, rate: float, stop: asyncio.Event) -> None:
        """Send `rate` requests per second until `stop` is set, and record the answers."""
        tasks: list[asyncio.Task[RehearsedRequest]] = []
        async with self._client() as client:
            started = time.time()
            while not stop.is_set():
                number = len(tasks)
                await asyncio.sleep(max(0.0, started + number / rate - time.time()))
                tasks.append(asyncio.create_task(self._ask(client, f"user-{number}", number)))
            self.records += await asyncio.gather(*tasks)

    async def _ask(self, client: httpx.AsyncClient, user: str, number: int) -> RehearsedRequest:
        record = RehearsedRequest(time.time())
        question = _QUESTIONS[number % len(_QUESTIONS)].format(_SUBJECTS[number // len(_QUESTIONS) % len(_SUBJECTS)])
        body = self._body(question, ANSWER_TOKENS) | {"stream": True, "logprobs": True, "user": user}
        is_complete = False
        try:
            async with client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response:
                record.version = response.headers.get("x-llmops-version", "")
                if response.status_code != 200:
                    await response.aread()
                    record.error = f"HTTP {response.status_code}: {response.text[:200]}"
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        is_complete = True
                    elif line.startswith("data: "):
                        _count(json.loads(line[6:]), record)
        except (httpx.HTTPError, ValueError) as error:
            record.error = repr(error)
        if not record.error and not is_complete:
            record.error = "the stream ended early"
        record.ended = time.time()
        return record

    def _body(self, question: str, max_tokens: int) -> dict[str, Any]:
        message = {"role": "user", "content": question}
        return {"model": self.model, "messages": [message], "max_tokens": max_tokens, "temperature": 0}

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=REQUEST_TIMEOUT, limits=httpx.Limits(max_connections=None))


def _count(event: dict[str, Any], record: RehearsedRequest) -> None:
    if "error" in event:
        record.error = str(event["error"].get("message", event["error"]))[:200]
    for choice in event.get("choices") or ():
        record.tokens += len((choice.get("logprobs") or {}).get("content") or ())


@dataclass(frozen=True)
class RehearsalReport:
    """The figures of a rehearsal.

    Attributes:
        requests: Number of requests of the load.
        failed: Number of requests without a complete answer.
        failed_by_fault: Number of requests without a complete answer because of the planted fault.
        doubled_tokens: Number of tokens beyond those that the requests asked for.
        lowest_throughput_ratio: Completed ÷ offered requests in the worst window. A window has 30
            seconds, or the time of 40 requests if that is longer.
        lowest_while: The state of the roll-out in the middle of the worst window.
        verdict: "promoted" or "rolled back".
        reason: The reason of the verdict.
        seconds_to_verdict: Seconds from the candidate's first requests to its last step, or to the
            decision to roll back.
        canary_requests: Number of requests that the candidate had answered until the verdict.
        seconds_to_rollback: Seconds from the verdict to the start of the last request on the
            candidate; None without a rollback.
        rate: Offered requests per second.
        capacity: Answers per second of each version alone.
        quality: Mean score of each version's answers to golden prompts, alone and without a fault.
        quality_tolerance: Loss of the score that was tolerated.
        fault: The name of the planted fault, or an empty text.
        errors: Up to five different messages of failed requests.
    """

    requests: int
    failed: int
    failed_by_fault: int
    doubled_tokens: int
    lowest_throughput_ratio: float
    lowest_while: str
    verdict: str
    reason: str
    seconds_to_verdict: float
    canary_requests: int
    seconds_to_rollback: float | None
    rate: float
    capacity: dict[str, float]
    quality: dict[str, float]
    quality_tolerance: float
    fault: str
    errors: list[str]


def lowest_throughput_ratio(records: Sequence[RehearsedRequest]) -> tuple[float, float]:
    """Return completed ÷ offered requests of the worst window, and the time of the window's middle."""
    begin, end = min(one.started for one in records), max(one.started for one in records)
    window = max(WINDOW, WINDOW_REQUESTS * (end - begin) / len(records))
    lowest, worst, at = 1.0, begin, begin + WINDOW_STEP
    while at + window <= end:
        offered = sum(at <= one.started < at + window for one in records)
        completed = sum(at <= one.ended < at + window and not one.error for one in records)
        if offered and completed / offered < lowest:
            lowest, worst = completed / offered, at + window / 2
        at += WINDOW_STEP
    return round(lowest, 3), worst


def make_report(records: Sequence[RehearsedRequest], states: Mapping[str, float], **conditions: Any) -> RehearsalReport:
    """Return the report of a roll-out.

    Args:
        records: The records of the load.
        states: The time at which each state of the roll-out first began, in seconds of `time.time`,
            in order.
        conditions: Fields of the report that do not come from the records.
    """
    *_, verdict = states
    decided_at = states.get("keeping", states.get("rolling back", states[verdict]))
    shifted_at = states.get("shifting", decided_at)
    ratio, worst = lowest_throughput_ratio(records)
    failed = [record for record in records if record.error]
    late = [one.started - decided_at for one in records if one.version == CANDIDATE and one.started > decided_at]
    return RehearsalReport(
        requests=len(records),
        failed=len(failed),
        failed_by_fault=sum(PLANTED_ERROR in record.error for record in failed),
        doubled_tokens=sum(max(0, record.tokens - ANSWER_TOKENS) for record in records),
        lowest_throughput_ratio=ratio,
        lowest_while=next((name for name, began in reversed(list(states.items())) if began <= worst), "before"),
        verdict=verdict,
        seconds_to_verdict=round(decided_at - shifted_at, 1),
        canary_requests=sum(one.version == CANDIDATE and one.ended <= decided_at for one in records),
        seconds_to_rollback=round(max(late, default=0.0), 1) if verdict == "rolled back" else None,
        errors=sorted({record.error for record in failed})[:5],
        **conditions,
    )
