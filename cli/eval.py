"""`llmops eval`: how much quality did quantisation cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("engine", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--against", metavar="CHECKPOINT", help="Measure again, against this source. Default: show what the build measured."
)
@click.option("--max-ppl-ratio", type=float, help="Fail when perplexity rose by more than this factor.")
@click.option("--min-top1", type=float, help="Fail when the most likely token stays the same less often than this.")
@click.option("--max-mean-kl", type=float, help="Fail when the mean KL divergence per token is larger (nats).")
@click.option("--max-token-kl", type=float, help="Fail when any token's KL divergence is larger (nats).")
@click.option("--json", "as_json", is_flag=True, help="Print figures, limits and verdict as JSON.")
def command(engine: Path, against: str | None, as_json: bool, **limits: Any) -> None:
    """Show how far the quantised ENGINE is from its source; a quantised Hugging Face folder works too.

    Without --against, shows what `llmops build` measured and stored. With it, the source is run on the bundled texts
    and prompts again, and the weights on disk are dequantised and compared.
    """
    import json
    from dataclasses import asdict

    from llmops.build.quality.evaluate import evaluate
    from llmops.cli.progress import make_progress
    from llmops.cli.quality import quality_lines

    quality, gates = evaluate(engine, against, limits, make_progress())
    if as_json:
        verdict = {"limits": asdict(gates), "passed": gates.passes(quality)}
        click.echo(json.dumps({**quality.as_dict(), **verdict}, indent=2))
    else:
        click.echo("\n".join(quality_lines(quality, gates)))
    gates.check(quality)
