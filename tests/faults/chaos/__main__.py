"""`python -m tests.faults.chaos ENGINE`: 10,000 requests while everything behind them is killed; exits with 1 if
the books are wrong."""

from pathlib import Path

import click

from tests.faults.chaos.run import chaos
from tests.support.mock_engine.repository import NAME
from tests.support.mock_engine.served import served_mock_engine


@click.command()
@click.argument("engine", type=click.Path(path_type=Path, exists=True))
@click.option("--requests", default=10_000, show_default=True)
@click.option("--at-once", default=48, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Decides who leaves, what is killed, and when.")
def main(engine: Path, requests: int, at_once: int, seed: int) -> None:
    """Kill gateways, ledger, broker, PostgreSQL and Valkey at random, but not the mock engine, which has the tokenizer
    of ENGINE. Then each request that began must have one row, with its tokens and its cost."""
    with served_mock_engine(engine, 0.01) as triton:
        result = chaos(triton.address, NAME, requests, at_once, seed=seed, metrics=triton.metrics)
    click.echo("\n".join(result.lines()))
    raise SystemExit(bool(result.wrong))


if __name__ == "__main__":
    main()
