"""`llmops doctor`: what this machine can do, and how to fix what it cannot."""

from __future__ import annotations

import json
from dataclasses import asdict

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Check what `llmops build` and `llmops serve` need on this machine.

    Each line is ok, not ok (with the fix) or a note (something this machine does not need). Exit code 1 when something
    is not ok.
    """
    from llmops.model_repository.doctor.check import healthy
    from llmops.model_repository.doctor.machine import examine

    checks = list(examine())
    if as_json:
        click.echo(json.dumps({"ok": healthy(checks), "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        for check in checks:
            colour = {"ok": "green", "not ok": "red"}.get(check.status, "yellow")
            click.echo(f"{click.style(f'{check.status:7}', fg=colour)}{check.name:22}{check.detail}")
            if check.fix:
                click.echo(f"{'':7}{'':22}→ {check.fix}")
    ctx.exit(0 if healthy(checks) else 1)
