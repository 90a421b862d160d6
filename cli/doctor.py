"""`llmops doctor`: checks of this machine, with the fix of each fault."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import click

from llmops.untrusted_text import escape_unsafe


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
@click.option("--deep", is_flag=True, help="Import, parse and start everything that works without a GPU.")
@click.pass_context
def command(ctx: click.Context, as_json: bool, deep: bool) -> None:
    """Check what `llmops build` and `llmops serve` need on this machine.

    Each line is ok, not ok (with the fix) or a note (something this machine does not need). The
    exit code is 1 if something is not ok.

    With --deep, run the last step of building the image; each line then says seen, failed, or needs
    a GPU. The exit code is 1 if anything failed.
    """
    if deep:
        _deep(ctx, as_json)
    from llmops.model_repository.doctor import healthy
    from llmops.model_repository.doctor.machine import check_machine

    checks = list(check_machine())
    if as_json:
        click.echo(json.dumps({"ok": healthy(checks), "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        for check in checks:
            colour = {"ok": "green", "not ok": "red"}.get(check.status, "yellow")
            click.echo(f"{click.style(f'{check.status:7}', fg=colour)}{check.name:22}{escape_unsafe(check.detail)}")
            if check.fix:
                click.echo(f"{'':7}{'':22}→ {escape_unsafe(check.fix)}")
    ctx.exit(0 if healthy(checks) else 1)


def _deep(ctx: click.Context, as_json: bool) -> None:
    from llmops.model_repository.doctor.deep import any_failed, run_deep_checks

    found = []
    for one in run_deep_checks(Path(os.environ.get("LLMOPS_IMAGE_ROOT", "/"))):
        found.append(one)
        if not as_json:
            colour = {"seen": "green", "failed": "red"}.get(one.outcome, "yellow")
            click.echo(
                f"{click.style(f'{one.outcome:12}', fg=colour)}{one.name:48} {escape_unsafe(one.detail)}".rstrip()
            )
    if as_json:
        click.echo(json.dumps({"ok": not any_failed(found), "found": [asdict(one) for one in found]}, indent=2))
    ctx.exit(1 if any_failed(found) else 0)
