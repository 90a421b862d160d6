"""`llmops replicas`: what each gateway believes of its replicas."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import click

from llmops.cli.options import gateways_option
from llmops.connections import check_url, http_failure, http_refusal
from llmops.errors import ServerError
from llmops.texts import shown

COLUMNS = ("model", "replica", "state", "heard", "running", "waiting", "own", "KV free", "step", "prefill")
#: Bytes of one gateway's report: a longer one is refused before it is parsed.
MOST_BYTES = 4 * 2**20
#: Seconds for one report, from the connection to its last byte.
PATIENCE = 10.0


@click.command("replicas")
@gateways_option("A gateway; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def command(urls: tuple[str, ...], as_json: bool) -> None:
    """Show what each gateway knows of its replicas: their states, and how busy they are.

    A replica is starting until it is heard of, suspect when nothing was heard for 5 s or its connection broke, draining
    when it takes no new requests, gone when its Triton is. `own` are this gateway's streams there. Where keys are asked
    for, LLMOPS_API_KEY has one.
    """
    gateways = [one for url in urls for one in ask(url)]
    if as_json:
        from llmops.cli.accounts.tables import print_json

        print_json({"gateways": gateways})
        return
    for gateway in gateways:
        _show(gateway)


def ask(url: str) -> list[dict[str, Any]]:
    """The gateway's workers, each with what it believes. Raises ServerError."""
    import httpx

    from llmops.cli.openai_client import api_key
    from llmops.fetch import fetch

    check_url(url)
    key = api_key()
    base = url.rstrip("/").removesuffix("/v1")

    async def get() -> bytes:
        async with httpx.AsyncClient(timeout=PATIENCE) as client:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return await asyncio.wait_for(fetch(client, f"{base}/replicas", MOST_BYTES, headers), PATIENCE)

    try:
        gateways: list[dict[str, Any]] = json.loads(asyncio.run(get()))["gateways"]
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        if status == 404:
            raise ServerError(f"{base} has one Triton and no replicas: it was started without `--replica`.") from error
        if status in (401, 403):
            raise http_refusal(base, status, "", scope="metrics") from error
        raise ServerError(f"{base} does not answer like a gateway of llmops; check the URL.") from error
    except (httpx.InvalidURL, httpx.HTTPError) as error:
        raise http_failure(base, error) from error
    except asyncio.TimeoutError as error:
        raise ServerError(f"{base} does not answer within {PATIENCE:g} s; ask again, or check the URL.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ServerError(f"{base} does not answer like a gateway of llmops; check the URL.") from error
    return gateways


def _show(gateway: dict[str, Any]) -> None:
    from llmops.cli.accounts.tables import show

    rows = [_row(model, one) for model, replicas in gateway["models"].items() for one in replicas]
    click.echo(f"gateway {shown(str(gateway['gateway']))}")
    if rows:
        show(COLUMNS, rows)
    else:
        click.echo("  It knows no model yet.")
    for server, why in gateway.get("unreached", {}).items():
        click.echo(f"  {shown(str(server))}: {shown(str(why))}")
    for model, replicas in gateway["models"].items():
        for one in replicas:
            if one["problem"]:
                click.echo(shown(f"  {one['replica']} takes no part in {model}: {one['problem']}."))


def _row(model: str, one: dict[str, Any]) -> list[str]:
    heard = one.get("heard_seconds_ago")
    blocks, rate = one.get("kv_blocks"), one.get("prefill_tokens_per_second")
    return [
        model,
        one["replica"],
        one["state"],
        "-" if heard is None else f"{heard:.1f} s ago",
        *(str(one.get(name, "-")) for name in ("running", "waiting", "own")),
        f"{one['kv_blocks_free'] / blocks:.0%}" if blocks else "-",
        f"{one['step_ms']:g} ms" if one.get("step_ms") else "-",
        f"{rate:,}/s" if rate else "-",
    ]
