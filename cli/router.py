"""`llmops router`: training of the choice between two models by an alias."""

import json
from pathlib import Path

import click

from llmops.cli.openai_client import ChatClient, embed_texts
from llmops.cli.options import training_options
from llmops.cli.output import print_line


@click.group("router")
def command() -> None:
    """Train the head of an alias that chooses between a small and a large model."""


@command.command("train")
@training_options
@click.option(
    "--max-missed",
    type=click.FloatRange(0, 0.5),
    default=0.05,
    help="Share of hard texts that may go to the small model; the threshold follows from it.",
)
@click.option(
    "--price",
    type=click.FloatRange(0, 1),
    default=0.1,
    help="Price of the small model as a share of the large one's, for the saved cost.",
)
def train(examples: Path, url: str, model: str, output: Path, max_missed: float, price: float) -> None:
    """Train a head on the labelled texts in FILE.

    FILE has one JSON object a line: {"text": "…", "category": "large"}, without a category for a
    text that the small model answers well. A quarter of the texts is held back: the threshold and
    the printed figures come from them.
    """
    from llmops.cli.filter_evaluation import read_examples
    from llmops.cli.router_training import train_router
    from llmops.output_files import write_text

    texts = read_examples(examples)
    vectors = embed_texts(ChatClient(url), model, [example.text for example in texts])
    head, report = train_router(texts, model, vectors, max_missed=max_missed)
    write_text(output, json.dumps(head))
    click.echo(f"accuracy {report.accuracy:.0%}, cost saved {report.saved(price):.0%} at a price of {price:g}")
    click.echo(f"{'':<12} to small  to large")
    click.echo(f"{'easy texts':<12} {report.small_kept:>8}  {report.small_raised:>8}")
    click.echo(f"{'hard texts':<12} {report.large_missed:>8}  {report.large_found:>8}")
    print_line(f"Wrote {output}.")
