"""The gate in front of two engines in the real Triton, with more than they can answer."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from starlette.types import Scope

from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Caller
from llmops.gateway.settings import GatewaySettings
from tests.support.gateway_stack import become, serving
from tests.support.mock_engine.planned import constant
from tests.support.mock_engine.replicas import Engines, engines
from tests.support.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("own-triton")]

STEP, PLACES, BLOCKS = 0.01, 4, 24
TIERS = {"interactive": {"weight": 4}, "batch": {"max_wait": "10m"}}


@pytest.fixture(scope="module")
def two(engine_dir: Path) -> Iterator[Engines]:
    """Start two engines with four sequences and 768 tokens each."""
    with engines(engine_dir, constant(STEP, 0.0, BLOCKS, max_batch_size=PLACES), 2) as stage:
        yield stage


class Named(Check):
    """A check that takes the caller from a header of the request."""

    async def before(self, scope: Scope, context: RequestContext) -> None:
        tier, _, tenant = dict(scope["headers"]).get(b"x-who", b"/").decode().partition("/")
        context.caller = Caller(tenant, share=tenant, tier=tier)


@dataclass
class Asker:
    """`ended`: who has been answered, `refused`: who has not, in that order."""

    client: httpx.AsyncClient
    ended: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    async def ask(self, who: str, prompt: str, tokens: int) -> httpx.Response:
        body = {"model": "mock", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        answer = await self.client.post("/v1/completions", json=body, headers={"x-who": who})
        (self.ended if answer.status_code == 200 else self.refused).append(who)
        return answer

    def asks(self, who: str, count: int, tokens: int, more: int = 1) -> list[asyncio.Task]:
        """Start `count` requests with `tokens` tokens each, or up to `more` - 1 tokens longer."""
        prompt = "Once upon a time"
        return [asyncio.create_task(self.ask(who, f"{prompt} {at}", tokens + at % more)) for at in range(count)]

    async def metric(self, name: str) -> float:
        page = (await self.client.get("/metrics")).text
        return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name))


@pytest.fixture
async def ask(two: Engines):
    """Makes a gateway in front of replicas."""
    async with AsyncExitStack() as stack:

        async def make(replicas: list[str], **settings: object) -> Asker:
            given = GatewaySettings(replicas=replicas, tiers=TIERS, **settings)
            client, _ = await stack.enter_async_context(serving(given, [Named()]))
            await become(client, *["ready"] * len(replicas), model="mock")
            return Asker(client)

        yield make


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


async def test_the_higher_tier_goes_first_and_the_youngest_of_the_lower_one_is_refused(two: Engines, ask) -> None:
    front = await ask(two.replicas, waiting={"entries": 30})
    night = front.asks("batch/night", 50, 40)
    await eventually(lambda: bool(front.refused))
    refused = [one.result() for one in night if one.done()]
    assert {one.status_code for one in refused} == {503}
    assert {one.json()["error"]["code"] for one in refused} == {"overloaded"}
    # 30 wait and 8 run, so each of the places comes up again after a few answers
    assert all(0 < int(one.headers["retry-after-ms"]) <= 60_000 for one in refused)
    for one in await asyncio.gather(*front.asks("interactive/chat", 8, 40)):
        assert text(one)
    # of 30 that came before them those that ran, and those that came beside the last of them
    assert front.ended.count("batch/night") <= 3 * 2 * PLACES
    answers = await asyncio.gather(*night)
    # no client is left without an answer: 20 found no place at most, and each of 8 chats took one from the queue
    counts = Counter(one.status_code for one in answers)
    assert (counts[200] + counts[503], counts[503] <= 20 + 8) == (50, True)


async def test_where_the_cache_is_full_the_youngest_of_the_lower_tier_waits_and_goes_on(two: Engines, ask) -> None:
    front = await ask(two.replicas[:1])
    # four answers of 7 blocks each, of 24 that there are
    asked = {"interactive/chat": "Hello.", **{f"batch/{name}": f"Tell me of {name}." for name in ("a", "b", "c")}}
    first, *rest = asked.items()
    calm = [await front.ask(*first, 205), *await asyncio.gather(*(front.ask(*one, 205) for one in rest))]
    # answers are thought to be short
    await asyncio.gather(*front.asks("batch/night", 100, 1))
    tasks = []
    for at, (who, prompt) in enumerate(asked.items(), 1):
        tasks.append(asyncio.create_task(front.ask(who, prompt, 205)))
        # one after the other: the last one is the youngest
        await eventually(lambda at=at: two.most("nv_trt_llm_request_metrics", "active") == at)
    answers = await asyncio.gather(*tasks)
    assert [text(one) for one in answers] == [text(one) for one in calm]
    assert await front.metric('llmops_failovers_total{reason="preempted"}') >= 1
    assert [one.headers.get("x-llmops-continued") for one in answers] == [None, None, None, "exact"]
    assert [one.json()["usage"]["completion_tokens"] for one in answers] == 4 * [205]


async def test_two_gateways_get_as_much_as_waits_in_them(two: Engines, ask) -> None:
    one, other = await ask(two.replicas), await ask(two.replicas)
    # of several lengths: a replica whose answers all end at once is everybody's
    asked = [*(one.asks(f"batch/{tenant}", 60, 6, 7) for tenant in ("a", "b", "c")), other.asks("batch/d", 60, 6, 7)]
    await eventually(lambda: len(one.ended) + len(other.ended) >= 160)
    # three quarters, were the chances not chances
    assert 0.62 <= len(one.ended) / (len(one.ended) + len(other.ended)) <= 0.88
    answers = await asyncio.gather(*(task for some in asked for task in some))
    assert {answer.status_code for answer in answers} == {200}
