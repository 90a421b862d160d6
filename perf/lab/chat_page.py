"""The chat page in a real Chromium while an answer arrives at 1,000 tokens a second.

Goals: painting takes at most 30 % of a core, the work for a token is the same at the end of 20,000
tokens as at their beginning, and the page paints first within half a second.
"""

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

from llmops.perf.lab.figures import Section
from llmops.perf.load.runner import run_async
from tests.support.browser import chromium
from tests.support.mock_engine.served import mock_engine

TOKENS = 20_000
PERIOD = 0.001
SAMPLE = 1.0  # seconds between two readings of the browser's counters
#: An answer as models write them, over and over: words, a list, code and a table.
TEXT = """## The plan

First, the **quick brown fox** jumps over the lazy dog, then it looks for `food` in the garden and comes back home.

- one thing that is to be done
- another thing that is to be done

```python
def add(first, second):
    return first + second  # the sum
```

| name | value |
|---|---|
| fox | 1 |

"""
CONDITIONS = f"One answer of {TOKENS:,} tokens of the mock engine, a token each {1e3 * PERIOD:g} ms."


class Sample(NamedTuple):
    """Counters of the page: CPU seconds of its main thread, and bytes that it received."""

    busy: float
    received: int


def measure(engine: Path, section: Section) -> None:
    """Add the figures."""
    with mock_engine(engine, PERIOD, text=TEXT) as (_, front):
        run_async(_measure(front.address.removesuffix("/v1"), section))


async def _measure(url: str, section: Section) -> None:
    from playwright.async_api import async_playwright

    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = await browser.new_page()
        # the first visit has an empty cache
        await page.goto(url)
        await page.locator("#model option").first.wait_for(state="attached")
        paint = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"
        section.add("first paint, empty cache", await page.evaluate(paint), "ms", 500)
        await page.evaluate(
            f'localStorage.setItem(\'llmops-options\', \'{{"theme": "light", "max_tokens": {TOKENS}}}\')'
        )
        await page.reload()
        await page.locator("#model option").first.wait_for(state="attached")
        samples = await _samples(page)
        _add_figures(section, samples)
        await browser.close()


async def _samples(page: Any) -> list[Sample]:
    """Ask for the answer, and read the counters until it has ended."""
    session = await page.context.new_cdp_session(page)
    received = 0

    def count(event: dict[str, Any]) -> None:
        nonlocal received
        received += event["dataLength"]

    session.on("Network.dataReceived", count)
    await session.send("Network.enable")
    await session.send("Performance.enable", {"timeDomain": "threadTicks"})
    await page.fill("#message", "Write.")
    await page.press("#message", "Enter")
    await page.locator(".turn.assistant[aria-busy] .body").wait_for()
    samples: list[Sample] = []
    while await page.locator(".turn.assistant[aria-busy]").count():
        counters = {one["name"]: one["value"] for one in (await session.send("Performance.getMetrics"))["metrics"]}
        samples.append(Sample(counters["TaskDuration"], received))
        await asyncio.sleep(SAMPLE)
    return samples


def _add_figures(section: Section, samples: list[Sample]) -> None:
    per_byte = TOKENS / samples[-1].received
    # CPU time for each token: the rate of a busy machine is lower, and its figure rather too high
    busy = _per_token(samples, per_byte)
    section.add("main thread of the page at 1,000 tokens/s", 100 * 1000 * busy, "% of a core", 30)
    part = len(samples) // 5
    begin, end = _per_token(samples[: part + 1], per_byte), _per_token(samples[-part - 1 :], per_byte)
    section.add("work for a token, last fifth over first fifth", end / begin, "×", 1.3)


def _per_token(samples: list[Sample], per_byte: float) -> float:
    """Return the main thread's seconds for each token."""
    first, last = samples[0], samples[-1]
    return (last.busy - first.busy) / ((last.received - first.received) * per_byte)
