"""Pages in the Chromium of this machine; without one a test is skipped, and in CI it fails."""

import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import GENEROUS

#: axe-core's grades that a user of a screen reader or a keyboard is stopped by.
GRAVE = ("serious", "critical")


def chromium() -> str:
    """Return the browser's path."""
    found = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
    if found is None:
        _missing("needs Chromium: apt-get install -y chromium")
    return str(found)


@contextlib.asynccontextmanager
async def started_browser(*arguments: str) -> AsyncIterator[Any]:
    """A browser, for all pages of a module: a start takes a second of CPU."""
    program = chromium()
    playwright = pytest.importorskip("playwright.async_api", reason="needs: pip install playwright")
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=program, args=["--no-sandbox", *arguments])
        try:
            yield browser
        finally:
            await browser.close()


@contextlib.asynccontextmanager
async def browser_page(browser: Any, **options: Any) -> AsyncIterator[Any]:
    """A page without cookies: `said` are the messages of its console, `asked` the addresses that it asked for."""
    made = await browser.new_page(**options)
    made.set_default_timeout(GENEROUS * 1000)
    made.said, made.asked = [], []
    made.on("console", lambda message: made.said.append(message.text))
    made.on("pageerror", lambda error: made.said.append(str(error)))
    made.on("request", lambda request: made.asked.append(request.url))
    try:
        yield made
    finally:
        await made.context.close()


async def open_chat(page: Any, url: str) -> None:
    """Open the chat page, and wait until it knows the models."""
    await page.goto(url)
    await page.locator("#model option").first.wait_for(state="attached")


async def ask(page: Any, text: str) -> None:
    """Send a message on the chat page."""
    await page.fill("#message", text)
    await page.press("#message", "Enter")


#: Marks a picture for the docs, which only `make pictures` takes.
for_the_docs = pytest.mark.skipif("LLMOPS_PICTURES" not in os.environ, reason="make pictures")


async def take_picture(page: Any, name: str) -> None:
    """Save what a page shows as `name` in $LLMOPS_PICTURES."""
    file = Path(os.environ["LLMOPS_PICTURES"], name)
    await page.screenshot(path=file, animations="disabled", caret="hide")
    assert file.stat().st_size > 10_000, "the picture is empty"


async def axe_faults(page: Any) -> list[str]:
    """Return what axe-core finds on a page and grades as serious or critical."""
    try:
        import axe_playwright_python
    except ImportError:
        _missing("needs: pip install axe-playwright-python")
    script = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
    # a policy that allows no inline script holds for this one, too, unless the driver evaluates it
    await page.evaluate(f"() => {{ {script}; window.axe = axe }}")
    found = await page.evaluate("() => axe.run()")
    assert len(found["passes"]) > 10
    return [
        f"{one['id']}: {node['html']} ({node.get('failureSummary')})"
        for one in found["violations"]
        if one["impact"] in GRAVE
        for node in one["nodes"]
    ]


def _missing(text: str) -> None:
    (pytest.fail if os.environ.get("CI") else pytest.skip)(text)
