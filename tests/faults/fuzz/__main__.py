"""The command."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import takewhile
from time import monotonic

import click
import httpx

from tests.faults.fuzz import FAMILIES, Case, Findings, Target, fuzz, some
from tests.faults.fuzz.runner import PATIENCE
from tests.faults.fuzz.watch import HealthWatch, memory_of

# requests of a family before its memory is looked at
WARM_UP = 200


@click.command()
@click.argument("url")
@click.option("--model", required=True, help="The chat model.")
@click.option("--embedding-model", default="minilm", show_default=True)
@click.option("--count", default=20_000, show_default=True, help="Mutated bodies.")
@click.option("--hostile", default=2_000, show_default=True, help="Requests of the other families together.")
@click.option("--family", "families", multiple=True, type=click.Choice(sorted(FAMILIES)), help="Only these.")
@click.option("--seed", default=0, show_default=True)
@click.option("--seconds", type=float, help="After which a family sends nothing more.")
@click.option("--max-lag", default=0.25, show_default=True, help="Seconds that /health/live may take meanwhile.")
@click.option(
    "--max-growth", default=256.0, show_default=True, help="MiB by which a family may leave its memory larger."
)
@click.option("--pid", type=int, help="The gateway's process; without it /metrics tells its memory.")
def main(
    url: str,
    model: str,
    embedding_model: str,
    count: int,
    hostile: int,
    families: tuple[str, ...],
    seed: int,
    seconds: float | None,
    max_lag: float,
    max_growth: float,
    pid: int | None,
) -> None:
    """Send mutated and hostile requests to the gateway at URL.

    Prints each violation with the body that caused it, and how many answers there were of each status.
    """
    failed = False
    for family, share in _shares(count, hostile, families).items():
        cases = some(family, Target(model, embedding_model), share, seed)
        # the first bodies fill caches and the allocator's pools, which are not given back
        asyncio.run(_fuzz(url, some(family, Target(model, embedding_model), min(share, WARM_UP), seed + 1)))
        before = memory_of(url, pid)
        with HealthWatch(url) as watch:
            findings = asyncio.run(_fuzz(url, cases if seconds is None else _until(monotonic() + seconds, cases)))
        if watch.worst > max_lag:
            findings.violations.append(f"/health/live took {watch.worst:.2f} s")
        findings.violations += [f"/health/live: {n} x {problem}" for problem, n in watch.problems.items()]
        growth = _growth(before, memory_of(url, pid))
        if growth is not None and growth > max_growth:
            findings.violations.append(f"the gateway's memory grew by {growth:.0f} MiB")
        failed |= _told(family, findings, watch.worst, growth)
    raise SystemExit(1 if failed else 0)


def _shares(count: int, hostile: int, families: tuple[str, ...]) -> dict[str, int]:
    """Return the number of cases of each family."""
    chosen = families or tuple(FAMILIES)
    others = max(len(set(chosen) - {"bodies"}), 1)
    return {family: count if family == "bodies" else hostile // others for family in chosen}


async def _fuzz(url: str, cases: Iterator[Case]) -> Findings:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        return await fuzz(client, cases)


def _until(deadline: float, cases: Iterator[Case]) -> Iterator[Case]:
    return takewhile(lambda _: monotonic() < deadline, cases)


def _growth(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _told(family: str, findings: Findings, lag: float, growth: float | None) -> bool:
    """Print what was found; True if something was wrong."""
    statuses = ", ".join(f"{n} x {status}" for status, n in sorted(findings.statuses.items()))
    memory = "memory unknown (name the gateway's --pid)" if growth is None else f"memory {growth:+.0f} MiB"
    statuses += f", {findings.left} left after {PATIENCE:g} s" if findings.left else ""
    click.echo(f"{findings.sent} {family}: {statuses}; /health/live within {lag * 1000:.0f} ms; {memory}")
    for violation in findings.violations[:20]:
        click.echo(violation, err=True)
    return bool(findings.violations)


if __name__ == "__main__":
    main()
