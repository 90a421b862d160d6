"""`llmops top`: a live view of gateways, models and replicas."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from llmops.cli.monitor.layout import render_screen
from llmops.cli.options import Duration, gateways_option
from llmops.cli.output import PIPED_WIDTH, table_console
from llmops.errors import ServerError

if TYPE_CHECKING:
    from llmops.cli.monitor.poller import GatewayPoller
    from llmops.cli.monitor.snapshot import FleetSnapshot


@click.command("top")
@gateways_option("A gateway, or dns:NAME:PORT for all behind a name; may be repeated.")
@click.option(
    "--engine",
    "engines",
    multiple=True,
    metavar="HOST:PORT",
    help="Triton's metrics, for gateways with one Triton.  [default: port 8002 of its host]",
)
@click.option("-i", "--interval", type=Duration(), default="2s", help="Time between two updates.")
@click.option("--window", type=Duration(), default="15s", help="Time over which rates and percentiles are taken.")
@click.option("--once", is_flag=True, help="Print once, after two polls --interval apart, and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per poll.")
def command(
    urls: tuple[str, ...], engines: tuple[str, ...], interval: float, window: float, once: bool, as_json: bool
) -> None:
    """Watch gateways, their models and replicas live, from /metrics.

    Without a terminal, one table is printed after another. Name each gateway, and not a load
    balancer in front of them. A gateway that asks for a key gets LLMOPS_API_KEY, which needs the
    scope metrics. The column OWN has the number of streams that these gateways have open on a
    replica. With --once the exit code is 1 if no gateway answers.
    """
    from llmops.cli.monitor.poller import GatewayPoller
    from llmops.cli.openai_client import api_key

    asyncio.run(_top(GatewayPoller(urls, engines, window, api_key()), interval, once, as_json))


async def _top(sources: GatewayPoller, interval: float, once: bool, as_json: bool) -> None:
    show = _once if once else _again_and_again
    try:
        await show(sources, interval, as_json)
    finally:
        await sources.close()


async def _once(sources: GatewayPoller, interval: float, as_json: bool) -> None:
    """Print one snapshot. Raise ServerError if no gateway answered."""
    board = await sources.look()
    if any(not one.problem for one in board.gateways):
        await asyncio.sleep(interval)
        board = await sources.look()
    _print(board, as_json)
    if all(one.problem for one in board.gateways):
        refused = next((one.problem for one in board.gateways if "key" in one.problem), "")
        if refused:
            raise ServerError(f"No gateway lets this key read its metrics: each {refused}.")
        raise ServerError("No gateway answers; start one with `llmops up` or `llmops gateway`, or name one with --url.")


async def _again_and_again(sources: GatewayPoller, interval: float, as_json: bool) -> None:
    from llmops.cli.monitor.terminal import poll_forever, show_live

    console = table_console(PIPED_WIDTH)
    if console.is_terminal and not console.is_dumb_terminal and not as_json:
        await show_live(sources, interval, console)
        return
    async for board in poll_forever(sources, interval):
        _print(board, as_json)
        if not as_json:
            click.echo()


def _print(board: FleetSnapshot, as_json: bool) -> None:
    if as_json:
        import json
        from dataclasses import asdict

        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        click.echo(json.dumps({"at": now, **asdict(board)}, ensure_ascii=False))
        return
    console = table_console(PIPED_WIDTH)
    console.print(render_screen(board, console.width))
