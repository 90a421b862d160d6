"""`llmops price`: what tokens cost, from when on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import click

from llmops.cli.accounts.options import store_options
from llmops.cli.accounts.store import myself, reading, writing
from llmops.cli.accounts.tables import dollars, price_data, print_json, when
from llmops.cli.accounts.tables import show as show_table
from llmops.cli.accounts.types import DollarsType, MomentType

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from llmops.store.prices import Price


@click.group("price")
def command() -> None:
    """Prices in US dollars per million tokens.

    A price holds from its date until the model's next one. What was used is billed at the price of that time, so a
    price that is in force is never changed: it is followed by another.
    """


@command.command("set")
@click.argument("model")
@click.option("--input", "into", type=DollarsType(), required=True, help="Per million prompt tokens.")
@click.option("--cached", type=DollarsType(), help="Prompt tokens found in the engine's cache.  [default: as --input]")
@click.option("--output", type=DollarsType(), required=True, help="Per million tokens of an answer.")
@click.option("--from", "begins", type=MomentType(), help="When: 7d, 2027-01-01 (UTC).  [default: now]")
@store_options
def set_(
    model: str, into: int, cached: int | None, output: int, begins: datetime | None, store: str | None, as_json: bool
) -> None:
    """The price of MODEL, which is the name that requests have."""
    by = myself()

    async def work(connection: AsyncConnection) -> Price:
        from llmops.store.prices import Price, set_price

        price = Price(model, begins or by.at, into, into if cached is None else cached, output)
        await set_price(connection, price, by)
        return price

    price = writing(store, work)
    if as_json:
        print_json(price_data(price))
    else:
        click.echo(f"{model}: {_text(price)} per million tokens, from {when(price.valid_from)} UTC.")


@command.command("list")
@click.argument("model", required=False)
@click.option("--at", type=MomentType(), help="Only those in force at this time, e.g. 2026-12-01 (UTC).")
@store_options
def list_(model: str | None, at: datetime | None, store: str | None, as_json: bool) -> None:
    """All prices there were and will be; of MODEL, or of all."""
    now = myself().at

    async def work(connection: AsyncConnection) -> tuple[Sequence[Price], dict[str, Price]]:
        from llmops.store.prices import list_prices, prices_at

        return await list_prices(connection, model), await prices_at(connection, at or now)

    found, in_force = reading(store, work)
    if at:
        found = [price for price in found if in_force.get(price.model) == price]
    if as_json:
        print_json([price_data(price) for price in found])
    elif not found:
        click.echo("No prices. Set one: llmops price set MODEL --input 0.6 --output 0.9", err=True)
    else:
        right = ("input", "cached", "output")
        show_table(("model", *right, "from", ""), [_row(price, in_force) for price in found], right)


def _text(price: Price) -> str:
    return (
        f"{dollars(price.input_micros)} in, {dollars(price.cached_micros)} cached, {dollars(price.output_micros)} out"
    )


def _row(price: Price, in_force: dict[str, Price]) -> list[str]:
    amounts = [dollars(price.input_micros), dollars(price.cached_micros), dollars(price.output_micros)]
    held = "in force" if in_force.get(price.model) == price else ""
    return [price.model, *amounts, when(price.valid_from), held]
