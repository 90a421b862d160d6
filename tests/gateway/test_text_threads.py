"""The threads for text and grammars: whoever brings much waits for it alone."""

import asyncio
import math
import threading
from collections import Counter
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.gateway.errors import UnavailableError
from llmops.gateway.ratelimit.fairness import FairShares
from llmops.gateway.text import chat_template, text_thread_pool
from llmops.gateway.text.chat_template import SLOW_SECONDS, ChatTemplate
from llmops.gateway.text.text_thread_pool import INLINE_CHARACTERS, CpuLimitError, TextThreadPool, thread_limit

LONG = INLINE_CHARACTERS + 1
PATIENCE = 60


class Held:
    """Work that goes on until it is let go; `begun` when it is on its thread."""

    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.end.wait(PATIENCE)
        return "held"


@pytest.fixture
def workers():
    with closing(TextThreadPool(threads=1, backlog=120)) as made:
        yield made


async def begun(held: Held) -> None:
    assert await asyncio.to_thread(held.begun.wait, PATIENCE)


async def test_clients_take_turns(workers):
    order: list[str] = []
    held = Held()
    first = asyncio.create_task(workers.run(held, LONG, "many"))
    await begun(held)
    names = ["many"] * 40 + ["one", "other"]
    rest = [asyncio.create_task(workers.run(lambda name=name: order.append(name), LONG, name)) for name in names]
    await asyncio.sleep(0)
    held.end.set()
    await asyncio.gather(first, *rest)
    assert (order[:4], len(order)) == (["many", "one", "other", "many"], len(names))


async def test_one_client_with_more_than_the_queue_has_room_for_leaves_room_for_others():
    held = Held()

    async def ask(caller: str) -> str:
        try:
            return await workers.run(held, LONG, caller)
        except UnavailableError as refused:
            return f"{refused.message[:21]}: {refused.headers()['retry-after']}"

    with closing(TextThreadPool(threads=1, backlog=256)) as workers:
        many = [asyncio.create_task(ask(f"a/{at}")) for at in range(260)]
        others = [asyncio.create_task(ask(f"b{at}/key")) for at in range(20)]
        await begun(held)
        held.end.set()
        assert await asyncio.gather(*others) == ["held"] * 20
        assert Counter(await asyncio.gather(*many)) == {"held": 129, "Too many long prompts: 2": 131}  # of 257
        assert await ask("a/new") == "held", "places are given back"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.booleans()), max_size=60), st.integers(0, 6))
def test_shares_are_never_more_than_there_are_and_all_come_back(steps, free):
    shares, held = FairShares(9, free), []
    for name, count, leave in steps:
        if leave and held:
            shares.give_back(*held.pop(0))
        before = shares.taken
        if shares.take(f"{name}/key", count):
            held.append((f"{name}/key", count))
        else:
            assert before + count > free, "what is free is refused to nobody"
        assert shares.taken == sum(count for _, count in held) <= 9 + free
    for share, count in held:
        shares.give_back(share, count)
    assert shares.taken == 0
    assert shares.take("new")


def limit_here() -> float:
    return thread_limit.cpu_seconds


async def test_what_is_not_brief_goes_on_elsewhere_and_holds_up_only_its_like(workers):
    held = Held()

    def heavy() -> str:
        if thread_limit.cpu_seconds < math.inf:
            raise CpuLimitError
        return held()

    long = asyncio.create_task(workers.run(heavy, LONG, "a"))
    await begun(held)
    assert await workers.run(limit_here, LONG, "b") == text_thread_pool.SHORT_LANE_SECONDS
    assert not long.done()
    held.end.set()
    assert (await long, await workers.run(limit_here, 1)) == ("held", text_thread_pool.INLINE_SECONDS)
    assert limit_here() == math.inf, "what else this thread does has the time it needs"


async def test_a_slow_template_is_rendered_where_it_holds_nobody_up(workers, monkeypatch):
    monkeypatch.setattr(text_thread_pool, "INLINE_SECONDS", 0)
    monkeypatch.setattr(text_thread_pool, "SHORT_LANE_SECONDS", 0)
    now, lanes = [1000.0], []
    monkeypatch.setattr(chat_template, "monotonic", lambda: now[0])
    slow = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})

    def render() -> str:
        lanes.append(threading.current_thread().name.split("_")[0])
        return slow.render([{"content": "a"}, {"content": "b"}]).text

    assert not slow.is_slow
    assert await workers.run(render, 1) == "ab"
    assert lanes == [threading.current_thread().name, "llmops-text", "llmops-long"]
    now[0] += SLOW_SECONDS - 1
    assert slow.is_slow
    now[0] += 2
    assert not slow.is_slow


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_after_a_slow_rendering_a_model_s_chats_start_on_a_thread(stack, monkeypatch, path):
    stack.say("Paris")
    sizes, run = [], TextThreadPool.run

    async def noted(self, work, size, caller=""):
        sizes.append(size)
        return await run(self, work, size, caller)

    monkeypatch.setattr(TextThreadPool, "run", noted)
    monkeypatch.setattr(text_thread_pool, "INLINE_SECONDS", 0)
    assert (await stack.client.post(path, json=stack.chat_body)).status_code == 200
    small, again = sizes
    assert small < INLINE_CHARACTERS < again
    assert (await stack.client.post(path, json=stack.chat_body)).status_code == 200
    assert sizes[2:] == [small + INLINE_CHARACTERS + 1]
