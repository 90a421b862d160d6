"""`llmops eval`: the quality that quantisation cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmops.cli.options import EXISTING_FOLDER

if TYPE_CHECKING:
    from llmops.build.engine_folder.manifest import QualityMetrics
    from llmops.build.quality.quality_gates import QualityGates


@click.command()
@click.argument("engine", type=EXISTING_FOLDER)
@click.option(
    "--against",
    metavar="CHECKPOINT",
    help="Measure again, against this source.  [default: show what the build measured]",
)
@click.option("--max-ppl-ratio", type=float, help="Fail when perplexity rose by more than this factor.")
@click.option("--min-top1", type=float, help="Fail when the most likely token stays the same less often than this.")
@click.option("--max-mean-kl", type=float, help="Fail when the mean KL divergence per token is larger (nats).")
@click.option("--max-token-kl", type=float, help="Fail when any token's KL divergence is larger (nats).")
@click.option("--json", "as_json", is_flag=True, help="Print figures, limits and verdict as JSON.")
def command(engine: Path, against: str | None, as_json: bool, **limits: Any) -> None:
    """Show how far the quantised ENGINE is from its source.

    Without --against, the command shows what `llmops build` measured and stored. With --against,
    the source is run on the bundled texts and prompts again, and the weights on disk are
    dequantised and compared.
    """
    import json
    from dataclasses import asdict

    from llmops.build.quality.evaluate import evaluate
    from llmops.cli.progress import make_progress

    quality, gates = evaluate(engine, against, limits, make_progress())
    if as_json:
        verdict = {"limits": asdict(gates), "passed": gates.passes(quality)}
        click.echo(json.dumps({**quality.model_dump(), **verdict}, indent=2))
    else:
        click.echo("\n".join(quality_lines(quality, gates)))
    gates.check(quality)


def quality_lines(quality: QualityMetrics, gates: QualityGates) -> list[str]:
    """Return a line for each figure, with the figure's limit.

    The lines contain no verdict, which `QualityGates.check` returns.
    """
    rows = [
        ("perplexity", f"x{quality.perplexity_ratio:.4f}", _limit("most", "x{:g}", gates.max_ppl_ratio),
         f"{quality.perplexity:.2f} with the source's weights"),
        ("most likely token", f"{quality.top1_agreement:.1%} same", _limit("least", "{:.0%}", gates.min_top1), ""),
        ("mean KL", f"{quality.mean_kl:.4f} nats", _limit("most", "{:g}", gates.max_mean_kl), ""),
        ("worst token's KL", f"{quality.worst_token_kl:.2f} nats", _limit("most", "{:g}", gates.max_token_kl), ""),
    ]  # fmt: skip
    if quality.golden_agreement is not None:
        prompts = f"of the source's greedy answers to {quality.prompts} prompts"
        rows.append(("answer tokens", f"{quality.golden_agreement:.1%} same", "", prompts))
    if quality.weight_error is not None:
        limit = _limit("most", "{:g}%", 100 * gates.max_weight_error if gates.max_weight_error else None)
        rows.append(("furthest weight", f"{quality.weight_error:.2%} off", limit, quality.weight_error_at))
    rows += _ranges(quality, gates)
    lines = [f"Against the source, on {quality.tokens:,} tokens and {quality.prompts} prompts:"]
    return lines + [f"  {name:<18} {value:<14} {limit:<17} {remark}".rstrip() for name, value, limit, remark in rows]


def _limit(kind: str, form: str, value: float | None) -> str:
    return "" if value is None else f"(at {kind} {form.format(value)})"


def _ranges(quality: QualityMetrics, gates: QualityGates) -> list[tuple[str, str, str, str]]:
    """Return the shares of activations that the calibrated ranges covered, as text.

    The text names the layers with the lowest and the highest share.
    """
    from llmops.build.quality.quality_gates import WIDEST

    if quality.narrowest is None or quality.widest is None:
        return []
    narrow, wide = quality.narrowest, quality.widest
    return [
        ("narrowest range", f"{narrow[0]:.2f} x reached", _limit("least", "{:g}", gates.min_range), narrow[1]),
        ("widest range", f"{wide[0]:.2f} x reached", _limit("most", "{:g}", WIDEST), wide[1]),
    ]
