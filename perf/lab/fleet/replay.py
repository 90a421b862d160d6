"""Sends a trace at its times, whatever becomes of what was sent before, and notes how each request went."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from llmops.perf.lab.fleet.trace import Asked
from llmops.perf.lab.mock_engine.repository import NAME
from llmops.perf.quantiles import percentile


@dataclass
class Seen:
    """One request. Seconds from the start of the trace; `told`: after how many to come back, of one that was refused;
    `cached` of the prompt's tokens, as usage has it."""

    asked: Asked
    sent: float
    status: int = 0
    first: float = -1.0
    last: float = -1.0
    prompt: int = 0
    cached: int = 0
    made: int = 0
    told: float = 0.0
    text: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200 and not self.error and self.made == self.asked.answer

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / max(self.made - 1, 1)

    def keeps(self, ttft: float, tpot: float) -> bool:
        """Whether it was answered in time."""
        return self.ok and self.ttft <= ttft and self.tpot <= tpot


@dataclass
class Went:
    """A whole trace."""

    seen: list[Seen] = field(default_factory=list)

    @property
    def ok(self) -> list[Seen]:
        return [one for one in self.seen if one.ok]

    @property
    def hit_rate(self) -> float:
        return sum(one.cached for one in self.ok) / max(sum(one.prompt for one in self.ok), 1)

    def of(self, what: Callable[[Seen], float], q: float) -> float:
        """A percentile, of those that were answered."""
        return percentile(sorted(map(what, self.ok)), q)


# the body of a request, beside what all have
Body = Callable[[Asked], dict[str, Any]]


def of_ids(asked: Asked) -> dict[str, Any]:
    return {"prompt": list(asked.ids)}


async def replay(url: str, trace: Sequence[Asked], body: Body = of_ids, keys: dict[str, str] | None = None) -> Went:
    """`url` ends in /v1; `keys`: what to send as a key, by tier. Every answer has as many tokens as are asked for."""
    went = Went()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=httpx.Timeout(600), limits=limits) as client:
        begun = time.perf_counter()
        tasks = []
        for one in trace:
            await asyncio.sleep(max(one.at - (time.perf_counter() - begun), 0))
            headers = {"authorization": f"Bearer {keys[one.tier]}"} if keys else {}
            seen = Seen(one, time.perf_counter() - begun)
            went.seen.append(seen)
            tasks.append(asyncio.create_task(_ask(client, url, seen, body(one), headers, begun)))
        await asyncio.gather(*tasks)
    return went


async def _ask(
    client: httpx.AsyncClient, url: str, seen: Seen, body: dict[str, Any], headers: dict[str, str], begun: float
) -> None:
    asked = {
        "model": NAME,
        "max_tokens": seen.asked.answer,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **body,
    }
    data, times = bytearray(), []
    try:
        async with client.stream("POST", f"{url}/completions", json=asked, headers=headers) as reply:
            seen.status = reply.status_code
            seen.told = float(reply.headers.get("retry-after-ms", 0)) / 1000
            async for some in reply.aiter_raw():
                times.append((time.perf_counter() - begun, len(data)))
                data += some
    except httpx.HTTPError as error:
        seen.error = repr(error)
    seen.last = time.perf_counter() - begun
    if seen.status == 200:
        _read(bytes(data), times, seen)
    elif not seen.error:
        seen.error = data.decode(errors="replace")


def _read(data: bytes, times: Sequence[tuple[float, int]], seen: Seen) -> None:
    """When the first and the last event with text had begun to come, and what usage says."""
    at, texts = 0, []
    for line in data.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            seen.error = str(event.get("error", "")) or seen.error
            text = "".join(choice.get("text") or "" for choice in event.get("choices", ()))
            if text:
                seen.last = next(when for when, place in reversed(times) if place <= at)
                seen.first = seen.last if seen.first < 0 else seen.first
                texts.append(text)
            if usage := event.get("usage"):
                seen.prompt, seen.made = usage["prompt_tokens"], usage["completion_tokens"]
                seen.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        at += len(line) + 1
    seen.text = "".join(texts)
