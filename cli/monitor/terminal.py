"""A full-screen display that is redrawn periodically and restores the terminal."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Callable, Iterator

from rich.console import Console
from rich.live import Live

from llmops.cli.monitor.layout import ViewOptions, render_screen
from llmops.cli.monitor.poller import GatewayPoller
from llmops.cli.monitor.snapshot import FleetSnapshot

KEYS = "q quits  s sorts  r replicas"
QUIT = "q"
#: Escape sequences that terminals send for arrow keys and similar keys.
SEQUENCES = re.compile(r"\x1b(\[[0-9;]*[A-Za-z~]|O.)?")


async def poll_forever(sources: GatewayPoller, interval: float) -> AsyncIterator[FleetSnapshot]:
    """Yield a snapshot every `interval` seconds, forever."""
    while True:
        yield await sources.look()
        await asyncio.sleep(interval)


async def show_live(sources: GatewayPoller, view: ViewOptions, interval: float, console: Console) -> None:
    """Show snapshots until q is pressed or a signal arrives."""
    events: asyncio.Queue[FleetSnapshot | str] = asyncio.Queue()
    watching = asyncio.create_task(_redraw(sources, interval, events))
    watching.add_done_callback(lambda _: events.put_nowait(QUIT))
    board: FleetSnapshot | None = None
    with _quit_on_signals(events.put_nowait), _read_keys(events.put_nowait):
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while (event := await events.get()) != QUIT:
                    if isinstance(event, FleetSnapshot):
                        board = event
                    else:
                        view = _handle_key(view, event)
                    if board is not None:
                        live.update(render_screen(board, view, console.width, console.height, KEYS), refresh=True)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching


async def _redraw(sources: GatewayPoller, interval: float, events: asyncio.Queue[FleetSnapshot | str]) -> None:
    async for board in poll_forever(sources, interval):
        events.put_nowait(board)


def _handle_key(view: ViewOptions, key: str) -> ViewOptions:
    if key == "s":
        return view.cycle_sort_order()
    return view.toggle_replicas() if key == "r" else view


@contextlib.contextmanager
def _quit_on_signals(tell: Callable[[str], None]) -> Iterator[None]:
    """Call `tell` with QUIT on a signal that would end the process, inside the block.

    The terminal can then be restored before the process ends.
    """
    loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for one in signals:
        loop.add_signal_handler(one, tell, QUIT)
    try:
        yield
    finally:
        for one in signals:
            loop.remove_signal_handler(one)


@contextlib.contextmanager
def _read_keys(tell: Callable[[str], None]) -> Iterator[None]:
    """Call `tell` with each key when the key is pressed, without Enter, inside the block."""
    if not sys.stdin.isatty():
        yield
        return
    loop, terminal = asyncio.get_running_loop(), sys.stdin.fileno()

    def pressed() -> None:
        try:
            keys = os.read(terminal, 64).decode(errors="replace")
        except OSError:
            keys = ""
        # end of input means that the terminal is gone
        for key in SEQUENCES.sub("", keys) if keys else QUIT:
            tell(key)

    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    loop.add_reader(terminal, pressed)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
