"""The chat page in a real Chromium while an answer arrives at 1,000 tokens per second.

Goals: painting takes at most 30 % of a core, a token costs as much at the end of 20,000 tokens as
at the beginning, and the first paint comes within half a second.
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
SAMPLE = 1.0  # Seconds between two readings of the browser's counters.
#: Part of an answer with the usual elements: words, a list, code and a table. The answer repeats
#: it.
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
    """The page's counters at one moment.

    Attributes:
        busy: CPU seconds of the page's main thread.
        received: Bytes that the page has received.
    """

    busy: float
    received: int


def measure(engine: Path, section: Section) -> None:
    """Add all figures of this benchmark to `section`."""
    with mock_engine(engine, PERIOD, text=TEXT) as (_, front):
        run_async(_measure(front.address.removesuffix("/v1"), section))


async def _measure(url: str, section: Section) -> None:
    from playwright.async_api import async_playwright

    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = await browser.new_page()
        # The first visit has an empty cache.
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
    """Request the answer, and return the page's counters at intervals until the answer has ended."""
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
    # The figure is computed from the CPU time per token, because tokens arrive more slowly on a
    # busy machine. The figure is an upper estimate.
    busy = _per_token(samples, per_byte)
    section.add("main thread of the page at 1,000 tokens/s", 100 * 1000 * busy, "% of a core", 30)
    part = len(samples) // 5
    begin, end = _per_token(samples[: part + 1], per_byte), _per_token(samples[-part - 1 :], per_byte)
    section.add("work for a token, last fifth over first fifth", end / begin, "×", 1.3)


def _per_token(samples: list[Sample], per_byte: float) -> float:
    """Return the CPU seconds of the page's main thread per token.

    `per_byte` is the number of tokens in a byte that the page receives.
    """
    first, last = samples[0], samples[-1]
    return (last.busy - first.busy) / ((last.received - first.received) * per_byte)
