"""`llmops prefix`: the reasons why a prompt is not found in the prefix cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmops.cli.options import EXISTING_FILE
from llmops.cli.output import print_json
from llmops.errors import InputError
from llmops.input_files import MAX_LIST_BYTES, parse_json, read_bounded
from llmops.untrusted_text import escape_unsafe
from llmops.urls import without_secrets

if TYPE_CHECKING:
    from llmops.cli.openai_client import ChatClient
    from llmops.cli.prefix_comparison import PromptDifference

#: Maximum number of differences that are shown for each prompt. Later differences rarely matter.
MAX_DIFFERENCES = 5
#: Maximum number of tokens that are shown before a difference: enough to recognize the place.
SHOWN_BEFORE = 12
#: Maximum number of tokens that are shown of a difference itself: enough to recognize it.
SHOWN_INSIDE = 24


@dataclass
class Prompt:
    """The prompt that the gateway renders from a request body."""

    name: str
    model: str
    ids: list[int]
    left_out: list[str]


@click.group("prefix")
def command() -> None:
    """Explain why prompts are not found in the prefix cache."""


@command.command("explain")
@click.argument("files", metavar="FILE…", nargs=-1, required=True, type=EXISTING_FILE)
@click.option("--url", metavar="URL", default="http://127.0.0.1:9000", help="A gateway.")
@click.option(
    "--model", metavar="NAME", help="The model that the prompts are for.  [default: the body's, or the first]"
)
@click.option(
    "--tokens-per-block",
    type=click.IntRange(1),
    default=32,
    help="Tokens in a block of the engine's KV cache. Only whole blocks are found.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def explain(files: tuple[Path, ...], url: str, model: str | None, tokens_per_block: int, as_json: bool) -> None:
    """Show where prompts differ, and what would be cached without the differences.

    Each FILE has request bodies of chat completions, responses or Anthropic's messages: one JSON
    object, or one JSON object per line. Each prompt is compared with the earlier prompt that has
    most in common with it. The gateway renders the prompts and runs no model. The key is read from
    LLMOPS_API_KEY.
    """
    from llmops.cli.openai_client import ChatClient

    bodies = [body for file in files for body in _read_bodies(file)]
    if len(bodies) < 2:
        raise InputError("One prompt cannot be compared; name a second request body.")
    with closing(ChatClient(url)) as client:
        served = client.models()
        prompts = [_tokenize(client, name, body, model, served) for name, body in bodies]
        reports = [_compare(client, prompts[:at], prompt, tokens_per_block) for at, prompt in enumerate(prompts) if at]
    if as_json:
        print_json(reports)
        return
    for report in reports:
        _print(report)


def _read_bodies(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = read_bounded(file, MAX_LIST_BYTES).decode()
        try:
            parsed = [parse_json(text)]
        except ValueError:
            parsed = [parse_json(line) for line in text.splitlines() if line.strip()]
    except OSError as error:
        raise InputError(
            f"{file} cannot be read ({error.strerror or error}); name a file that this user may read."
        ) from None
    except ValueError as error:
        raise InputError(f"{file} is not JSON ({error}); save the body of a request in it.") from None
    for line, body in enumerate(parsed, start=1):
        name = str(file) if len(parsed) == 1 else f"{file}:{line}"
        if not isinstance(body, dict):
            raise InputError(f"{name} is not a request body; a request body is a JSON object.")
        yield name, body


def _tokenize(client: ChatClient, name: str, body: dict[str, Any], model: str | None, served: list[str]) -> Prompt:
    from llmops.cli.prompt_bodies import prompt_fields
    from llmops.gateway.errors import ApiError

    try:
        fields, left_out = prompt_fields(body)
    except ApiError as error:
        raise InputError(f"{name} is not a request body: {error.message}") from None
    if "messages" not in fields:
        raise InputError(f"{name} is not a request body: it has neither `messages` nor `input`.")
    own = body.get("model")
    chosen = model or (own if own in served else next(iter(served), None))
    if chosen is None:
        raise InputError(
            f"{without_secrets(client.url)} serves no model; start one, or name another gateway with --url."
        )
    ids = client.post(_beside(client, "tokenize"), {"model": chosen, **fields})["tokens"]
    return Prompt(name, chosen, ids, left_out)


def _beside(client: ChatClient, path: str) -> str:
    """Return the URL of a path of the gateway that is not below /v1."""
    return f"{client.url.removesuffix('/v1')}/{path}"


def _compare(client: ChatClient, earlier: list[Prompt], prompt: Prompt, tokens_per_block: int) -> dict[str, Any]:
    from llmops.cli.prefix_comparison import compare_prompts

    def cached(equal: int) -> int:
        # the engine always computes the last token of a prompt
        return min(equal, len(prompt.ids) - 1) // tokens_per_block * tokens_per_block

    def equal_beginning(differences: list[PromptDifference], other: Prompt) -> int:
        return differences[0].equal_before if differences else min(len(other.ids), len(prompt.ids))

    compared = [(compare_prompts(other.ids, prompt.ids), other) for other in earlier]
    differences, nearest = max(compared, key=lambda one: equal_beginning(*one))
    return {
        "prompt": prompt.name,
        "earlier": nearest.name,
        "model": prompt.model,
        "tokens": len(prompt.ids),
        "cached": cached(equal_beginning(differences, nearest)),
        "left_out": prompt.left_out,
        "more_differences": max(0, len(differences) - MAX_DIFFERENCES),
        "differences": [
            {
                "token": one.start,
                "agrees_from": one.end if one.end < len(prompt.ids) else None,
                "before": _text(client, prompt, max(0, one.start - SHOWN_BEFORE), one.start),
                "earlier_text": _text(client, nearest, one.earlier_start, one.earlier_end, SHOWN_INSIDE),
                "text": _text(client, prompt, one.start, one.end, SHOWN_INSIDE),
                "cached_without": cached(one.equal_after),
            }
            for one in differences[:MAX_DIFFERENCES]
        ],
    }


def _text(client: ChatClient, prompt: Prompt, start: int, end: int, most: int | None = None) -> str:
    """Return the text of tokens, truncated after `most` tokens."""
    shown = end if most is None else min(end, start + most)
    ids = prompt.ids[start:shown]
    text = client.post(_beside(client, "detokenize"), {"model": prompt.model, "tokens": ids})["prompt"] if ids else ""
    return f"{text}…" if shown < end else str(text)


def _print(report: dict[str, Any]) -> None:
    tokens = report["tokens"]

    def share(cached: int) -> str:
        return f"{cached:,} of {tokens:,} tokens ({cached / max(tokens, 1):.0%})"

    click.echo(f"{report['prompt']}: {share(report['cached'])} can come from the cache after {report['earlier']}.")
    if report["left_out"]:
        click.echo(f"  Left out of the prompt: {escape_unsafe(', '.join(report['left_out']))}.")
    for number, one in enumerate(report["differences"], start=1):
        again = one["agrees_from"]
        until = "do not agree again" if again is None else f"agree again from token {again:,} on"
        click.echo(f"  {number}. The prompts part at token {one['token']:,} and {until}.")
        click.echo(f"     both     {_line(one['before'])}")
        click.echo(f"     earlier  {_line(one['earlier_text'])}")
        click.echo(f"     now      {_line(one['text'])}")
        if again is not None:
            also = "this difference" if number == 1 else "the differences so far"
            click.echo(f"     Without {also}: {share(one['cached_without'])}.")
    if report["more_differences"]:
        click.echo(f"  {report['more_differences']} more differences follow.")


def _line(text: str) -> str:
    return escape_unsafe(json.dumps(text, ensure_ascii=False)) if text else "nothing"
