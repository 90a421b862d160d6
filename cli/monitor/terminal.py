"""A full-screen display that is redrawn periodically and restores the terminal."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator

from rich.console import Console
from rich.live import Live

from llmops.cli.monitor.layout import render_screen
from llmops.cli.monitor.poller import GatewayPoller
from llmops.cli.monitor.snapshot import FleetSnapshot


async def poll_forever(sources: GatewayPoller, interval: float) -> AsyncIterator[FleetSnapshot]:
    """Yield a snapshot every `interval` seconds, forever."""
    while True:
        yield await sources.look()
        await asyncio.sleep(interval)


async def show_live(sources: GatewayPoller, interval: float, console: Console) -> None:
    """Show snapshots until a signal arrives."""
    screen = Live(console=console, screen=True, auto_refresh=False)
    with contextlib.suppress(asyncio.CancelledError), _cancel_on_signals(), screen as live:
        async for board in poll_forever(sources, interval):
            live.update(render_screen(board, console.width, console.height), refresh=True)


@contextlib.contextmanager
def _cancel_on_signals() -> Iterator[None]:
    """Cancel the running task on a signal that would end the process, inside the block.

    The terminal can then be restored before the process ends.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    assert task is not None
    for one in signals:
        loop.add_signal_handler(one, task.cancel)
    try:
        yield
    finally:
        for one in signals:
            loop.remove_signal_handler(one)
