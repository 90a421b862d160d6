"""Streams without a pause between them, and what was wrong with each: its text, its usage, how long it stood still."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

_CONTINUED = b": continued "


@dataclass(frozen=True)
class Question:
    """A prompt that is always asked in the same way, greedily."""

    model: str
    prompt: str
    tokens: int

    def body(self) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_tokens": self.tokens, "ignore_eos": True}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, "prompt": self.prompt, **sampling, **stream}


@dataclass
class Told:
    """The answer that a client received.

    Attributes:
        times: Arrival times of its events (perf_counter).
        splices: The splices of failovers that the client was notified of (`exact`, …).
    """

    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish: str = ""
    splices: str = ""
    error: str = ""
    times: list[float] = field(default_factory=list)

    def pause(self) -> float:
        """The longest time between two events."""
        at = self._longest()
        return self.times[at] - self.times[at - 1] if at else 0.0

    def resumed(self) -> tuple[float, int]:
        """Return the end of the longest pause, and the tokens of prompt and answer until then."""
        at = self._longest()
        return self.times[at], self.prompt_tokens + at

    def _longest(self) -> int:
        """The event that was waited for longest; 0 where there are none."""
        return max(range(1, len(self.times)), key=lambda at: self.times[at] - self.times[at - 1], default=0)

    def same(self, other: Told) -> bool:
        """The same answer, and the same bill."""
        return self._answer() == other._answer() and not self.error and not other.error

    def _answer(self) -> tuple[Any, ...]:
        return self.text, self.finish, self.prompt_tokens, self.completion_tokens


async def ask(client: httpx.AsyncClient, url: str, question: Question, told: Told | None = None) -> Told:
    """One streamed completion; `told` shows how far it has come."""
    told = told if told is not None else Told()
    data = bytearray()
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=question.body()) as reply:
            async for some in reply.aiter_raw():
                told.times.append(time.perf_counter())
                data += some
            if reply.status_code != 200:
                told.error = data.decode(errors="replace")
                return told
    except httpx.HTTPError as error:
        told.error = repr(error)
    _read(bytes(data), told)
    return told


def _read(data: bytes, told: Told) -> None:
    texts = []
    for line in data.split(b"\n"):
        if line.startswith(_CONTINUED):
            told.splices = line[len(_CONTINUED) :].decode()
        elif line.startswith(b"data: {"):
            event = json.loads(line[6:])
            told.error = event.get("error", {}).get("message", told.error)
            for choice in event.get("choices", ()):
                texts.append(choice["text"])
                told.finish = choice["finish_reason"] or told.finish
            if usage := event.get("usage"):
                told.prompt_tokens, told.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    told.text = "".join(texts)
    if not data.rstrip().endswith(b"data: [DONE]"):
        told.error = told.error or "the stream ended without its last event"


class Load:
    """One stream per question, each begun anew as soon as it has ended; `ended` has them all, with their question."""

    def __init__(self, url: str, questions: Sequence[Question]) -> None:
        self._url, self._questions = url, questions
        self.ended: list[tuple[Question, Told]] = []
        self._running: dict[int, Told] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._over = False

    async def __aenter__(self) -> Load:
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(120), limits=limits)
        self._tasks = [asyncio.create_task(self._go_on(at, one)) for at, one in enumerate(self._questions)]
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Let what is running come to its end."""
        self._over = True
        await asyncio.gather(*self._tasks)
        await self._client.aclose()

    async def _go_on(self, at: int, question: Question) -> None:
        while not self._over:
            told = self._running[at] = Told()
            self.ended.append((question, await ask(self._client, self._url, question, told)))

    async def renewed(self) -> None:
        """Wait until every stream of this moment has ended."""
        now = dict(self._running)
        while any(self._running[at] is told for at, told in now.items()):
            await asyncio.sleep(0.01)

    async def in_flight(self) -> None:
        """Wait until every stream has begun and produced something."""
        begun = dict(self._running)
        while len(self._running) < len(self._questions) or any(
            self._running[at] is told and not told.times for at, told in begun.items()
        ):
            await asyncio.sleep(0.01)
            begun = dict(self._running)


async def reference(url: str, questions: Sequence[Question]) -> dict[Question, Told]:
    """The answer to each question while nothing is wrong, all at once. Raises what went wrong."""
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        found = await asyncio.gather(*(ask(client, url, one) for one in questions))
    for told in found:
        assert not told.error, told.error
    return dict(zip(questions, found, strict=True))
