"""`llmops price`: set and list prices of models."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING

import click

from llmops.cli.accounts.account_options import admin_options
from llmops.cli.accounts.admin_client import AdminClient
from llmops.cli.accounts.param_types import DOLLARS, TIMESTAMP, typed_values
from llmops.cli.output import format_timestamp, print_result, print_results
from llmops.units import MICROS_PER_USD, format_usd

if TYPE_CHECKING:
    from llmops.control.admin.schemas import PriceRead


@click.group("price")
def command() -> None:
    """Manage prices, in US dollars per million tokens.

    A price is valid from its date until the model's next price. Usage is billed at the price of its
    time, so a price in force is never changed, only followed by another price.
    """


@command.command("set")
@click.argument("model")
@click.option("--input", "input_price", type=DOLLARS, required=True, help="Price per million prompt tokens.")
@click.option(
    "--cached", type=DOLLARS, help="Price per million prompt tokens in the engine's cache.  [default: as --input]"
)
@click.option("--output", type=DOLLARS, required=True, help="Price per million output tokens.")
@click.option(
    "--from", "valid_from", type=TIMESTAMP, help="Valid from: 7d (from now) or 2027-01-01 (UTC).  [default: now]"
)
@admin_options
def set_(
    model: str,
    input_price: Decimal,
    cached: Decimal | None,
    output: Decimal,
    valid_from: datetime | None,
    admin: AdminClient,
    as_json: bool,
) -> None:
    """Set the price of MODEL, the name that requests use."""
    from llmops.control.admin.schemas import PriceCreate, PriceRead

    optional = typed_values({"cached": cached, "valid_from": valid_from})
    body = PriceCreate(model=model, input=input_price, output=output, **optional)
    price = admin.request("POST", ("prices",), PriceRead, body=body)
    since = format_timestamp(price.valid_from)
    text = f"{model}: {_summary(price)} per million tokens, from {since} UTC. Gateways read it within 30 s."
    print_result(price, as_json, text)


@command.command("list")
@click.argument("model", required=False)
@click.option("--at", type=TIMESTAMP, help="Only prices in force at this time, e.g. 2026-12-01 (UTC).")
@admin_options
def list_(model: str | None, at: datetime | None, admin: AdminClient, as_json: bool) -> None:
    """List past, present and future prices, of MODEL or of all models."""
    from llmops.control.admin.schemas import PriceListQuery, PriceRead

    query = PriceListQuery(**typed_values({"model": model, "at": at}))
    prices = admin.request("GET", ("prices",), tuple[PriceRead, ...], query=query)
    right, empty = ("input", "cached", "output"), "No prices. Set one: llmops price set MODEL --input 0.6 --output 0.9"
    print_results(prices, as_json, empty, ("model", *right, "from", ""), _row, right)


def _summary(price: PriceRead) -> str:
    return f"{_dollars(price.input)} in, {_dollars(price.cached)} cached, {_dollars(price.output)} out"


def _row(price: PriceRead) -> list[str]:
    amounts = [_dollars(amount) for amount in (price.input, price.cached, price.output)]
    return [price.model, *amounts, format_timestamp(price.valid_from), "in force" if price.in_force else ""]


def _dollars(amount: Decimal) -> str:
    return format_usd(int(amount * MICROS_PER_USD))
