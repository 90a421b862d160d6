"""`llmops safety`: tests of filters, training of a classifier, and red-team prompts.

The prompts are sent through a running deployment.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmops.cli.openai_client import ChatClient, embed_texts
from llmops.cli.options import EXISTING_FILE, training_options
from llmops.cli.output import print_line
from llmops.errors import InputError, LlmopsError, ServerError
from llmops.input_files import MALFORMED

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@click.group("safety")
def command() -> None:
    """Test and train the safety filters of a gateway."""


@command.command("test")
@click.argument("examples", metavar="FILE", type=EXISTING_FILE)
@click.option("--config", type=EXISTING_FILE, required=True, help="The gateway's settings, which describe the filters.")
@click.option("--url", metavar="URL", help="A gateway with the models that filters of kind `model` ask.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def check(examples: Path, config: Path, url: str | None, as_json: bool) -> None:
    """Print how well each filter works on the labelled texts in FILE.

    The figures are recall, false positives and leaked characters.

    FILE has one JSON object a line: {"text": "…", "category": "hate"}, without a category for a
    clean text. The recall of a filter counts only examples of its categories. The exit code is 1 if
    a character of a match left a stream in `hold`.
    """
    from llmops.cli.filter_evaluation import evaluate, read_examples
    from llmops.cli.progress import make_progress
    from llmops.gateway.safety.filters import FilterUnavailableError
    from llmops.gateway.safety.policy import create_filter
    from llmops.gateway.settings import load_settings

    settings = load_settings(config).safety
    if not settings.filters:
        raise InputError(f"{config} describes no safety filters; add some as docs/safety.md explains.")
    texts = read_examples(examples)

    async def embed(model: str, batch: Sequence[str]) -> Any:
        if url is None:
            raise InputError("Filters of kind model need --url, a gateway that serves the model.")
        return embed_texts(ChatClient(url), model, batch)

    async def generate(model: str, message: str, max_tokens: int) -> str:
        if url is None:
            raise InputError("Filters of kind model need --url, a gateway that serves the model.")
        return await asyncio.to_thread(_answer, ChatClient(url), model, message, max_tokens)

    filters = {name: create_filter(name, one, embed, generate) for name, one in settings.filters.items()}
    progress = make_progress()
    with progress.stage("Judging", len(texts)):
        try:
            reports = asyncio.run(evaluate(filters, texts, progress.advance))
        except FilterUnavailableError as error:
            raise LlmopsError(f"A filter could not judge: {error}") from error
    if as_json:
        click.echo(json.dumps({name: report.as_dict() for name, report in reports.items()}, indent=2))
    else:
        for name, report in reports.items():
            click.echo(
                f"{name:<20} recall {_share(report.found, report.expected)}  "
                f"false positives {_share(report.false_positives, report.clean)}  leaked {report.leaks} characters"
            )
            for text in report.missed:
                click.echo(f"  missed: {text[:80]!r}")
    if any(report.leaks for report in reports.values()):
        raise SystemExit(1)


@command.command("train")
@training_options
@click.option(
    "--max-false-positives",
    type=click.FloatRange(0, 0.5),
    default=0.02,
    help="Share of clean texts that may be found; the thresholds follow from it.",
)
def train(examples: Path, url: str, model: str, output: Path, max_false_positives: float) -> None:
    """Train a classifier on the labelled texts in FILE, for a filter of kind `model`.

    A quarter of the texts is held back: thresholds and the printed figures come from them.
    """
    from llmops.cli.filter_evaluation import read_examples, train_head
    from llmops.output_files import write_text

    async def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        return embed_texts(ChatClient(url), model, texts)

    head = asyncio.run(train_head(read_examples(examples), model, embed, max_false_positives=max_false_positives))
    write_text(output, json.dumps(head))
    for category in head["weights"]:
        recall, wrong = head["recall"][category], head["false_positives"][category]
        print_line(
            f"{category:<20} recall {recall:.0%}  false positives {wrong:.0%}  threshold "
            f"{head['thresholds'][category]:.2f}"
        )
    print_line(f"Wrote {output}.")


@command.command("redteam")
@click.option("--url", metavar="URL", default="http://127.0.0.1:9000", help="The gateway.")
@click.option("--model", metavar="NAME", required=True, help="The model to ask.")
@click.option("--list", "listed", type=EXISTING_FILE, help="Your own prompts, in the format of `check`.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each prompt.")
def redteam(url: str, model: str, listed: Path | None, as_json: bool) -> None:
    """Send adversarial prompts through a running deployment, and print the outcome of each prompt.

    The key is read from LLMOPS_API_KEY. The exit code is 1 if a prompt with a category was answered
    in full.
    """
    from importlib.resources import as_file, files

    from llmops.cli.filter_evaluation import read_examples

    with as_file(files("llmops.gateway.safety") / "redteam.jsonl") as shipped:
        prompts = read_examples(listed or shipped)
    client, answered = ChatClient(url), 0
    for prompt in prompts:
        outcome = _ask(client, model, prompt.text)
        answered += bool(prompt.category) and outcome == "answered"
        if as_json:
            click.echo(json.dumps({"text": prompt.text, "category": prompt.category, "outcome": outcome}))
        else:
            print_line(f"{outcome:<10} {prompt.category or 'clean':<18} {prompt.text[:70]}")
    total = sum(bool(one.category) for one in prompts)
    click.echo(f"{total - answered} of {total} adversarial prompts were refused or cut.", err=as_json)
    if answered:
        raise SystemExit(1)


def _answer(client: ChatClient, model: str, message: str, max_tokens: int) -> str:
    """Return a model's most likely answer to a message."""
    body = {"model": model, "messages": [{"role": "user", "content": message}], "max_completion_tokens": max_tokens}
    answer = client.post("/chat/completions", {**body, "temperature": 0})
    return str(answer["choices"][0]["message"]["content"] or "")


def _ask(client: ChatClient, model: str, text: str) -> str:
    """Return the outcome of a prompt: `refused`, `cut` or `answered`."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 64}
    answer = client.post("/chat/completions", body, accept=(400,))
    try:
        if "error" not in answer:
            return "cut" if answer["choices"][0]["finish_reason"] == "content_filter" else "answered"
        code, message = answer["error"].get("code"), answer["error"].get("message")
    except MALFORMED as error:
        raise client.malformed() from error
    if code == "content_policy_violation":
        return "refused"
    raise ServerError(f"The server rejected the test prompt: {message}; correct the model or the key.")


def _share(count: int, total: int) -> str:
    return f"{count}/{total} ({count / total:.0%})" if total else "no examples"
