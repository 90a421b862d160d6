"""`python -m tests.faults.alerts ENGINE`: every alert fires under its fault, and is gone when that is mended."""

import time
from pathlib import Path

import click

from tests.faults.alerts.stack import watched


@click.command()
@click.argument("engine", type=click.Path(path_type=Path, exists=True))
def main(engine: Path) -> None:
    """ENGINE is any engine folder; only its tokenizer is used."""
    with watched(engine) as stack:
        steps = [("all is well", stack.settle), ("faults planted", stack.plant), ("faults mended", stack.settle)]
        for what, step in (*steps, ("Triton killed", stack.lose_triton)):
            begun = time.monotonic()
            step()
            firing = ", ".join(sorted(stack.prometheus.firing())) or "nothing"
            click.echo(f"{what}: {firing} fires after {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
