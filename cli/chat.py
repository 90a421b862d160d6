"""`llmops chat`: a terminal chat with any OpenAI endpoint."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from llmops.errors import InputError, LlmopsError
from llmops.untrusted_text import escape_unsafe
from llmops.urls import without_secrets

if TYPE_CHECKING:
    from llmops.cli.openai_client import ChatClient, ChatDelta

DEFAULT_URL = "http://127.0.0.1:9000/v1"
#: Default maximum tokens of an answer. Small models often do not end an answer by themselves.
DEFAULT_TOKENS = 1024


@click.command("chat")
@click.option("--url", envvar=["LLMOPS_URL", "OPENAI_BASE_URL"], default=DEFAULT_URL, help="OpenAI endpoint.")
@click.option("--model", help="Model to talk to.  [default: the first one served]")
@click.option("--system", help="A system prompt.")
@click.option("--once", metavar="TEXT", help="Answer TEXT (- reads it from standard input) and exit.")
@click.option(
    "--temperature", type=click.FloatRange(0, 2), help="Sampling temperature; 0 is greedy.  [default: the server's]"
)
@click.option("--max-tokens", type=click.IntRange(1), help=f"Longest answer, in tokens.  [default: {DEFAULT_TOKENS}]")
def command(url: str, model: str | None, system: str | None, once: str | None, **sampling: Any) -> None:
    """Chat in the terminal with any OpenAI endpoint.

    Ctrl-C stops the answer, not the program. An API key is read from LLMOPS_API_KEY or
    OPENAI_API_KEY.
    """
    from llmops.cli.openai_client import ChatClient

    client = ChatClient(url)
    options = {name: value for name, value in sampling.items() if value is not None}
    with contextlib.closing(client):
        messages = [{"role": "system", "content": system}] if system else []
        chat = Chat(client, model or _first_model(client), options, messages)
        if once is not None:
            chat.answer_once(sys.stdin.read() if once == "-" else once)
        else:
            _converse(chat)


@dataclass
class Chat:
    """A conversation in the terminal: its messages, and the printing of answers."""

    client: ChatClient
    model: str
    options: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)

    def answer_once(self, text: str) -> None:
        """Print the answer to one text and nothing else."""
        if not text.strip():
            raise InputError("--once needs a text to answer, but the text is empty; give one.")
        self.messages.append({"role": "user", "content": text})
        self._stream()
        click.echo()

    def answer(self, text: str) -> None:
        """Send a message and print the answer.

        Ctrl-C keeps the answer so far. An error removes the message from the conversation.
        """
        self.messages.append({"role": "user", "content": text})
        said: list[str] = []
        try:
            self._stream(said)
        except KeyboardInterrupt:
            click.secho(" [stopped]", dim=True, nl=False)
        except LlmopsError as error:
            self.messages.pop()
            click.secho(escape_unsafe(error.message, 4096, lines=True), fg="red", err=True)
            return
        click.echo()
        if said:
            self.messages.append({"role": "assistant", "content": "".join(said)})
        else:
            self.messages.pop()

    def _stream(self, said: list[str] | None = None) -> None:
        for delta in self._deltas():
            if delta.finish:
                _say_if_cut(delta.finish, self.options.get("max_tokens", DEFAULT_TOKENS))
            elif not delta.reasoning:
                if said is not None:
                    said.append(delta.text)
                click.echo(escape_unsafe(delta.text, len(delta.text), lines=True), nl=False)
            elif said is not None:
                click.secho(escape_unsafe(delta.text, len(delta.text), lines=True), dim=True, nl=False)
            sys.stdout.flush()

    def _deltas(self) -> Iterator[ChatDelta]:
        """Stream an answer.

        If the context has no room for the default token limit, the request is sent without a limit.
        """
        from llmops.cli.openai_client import ContextError

        limited = {"max_tokens": DEFAULT_TOKENS, **self.options}
        try:
            yield from self.client.chat(self.model, self.messages, limited)
        except ContextError:
            if "max_tokens" in self.options:
                raise
            yield from self.client.chat(self.model, self.messages, self.options)


def _say_if_cut(finish: str, limit: int) -> None:
    if finish == "length":
        said = f"[cut: the answer reached {limit:,} tokens or the end of the context; --max-tokens sets the limit]"
        click.secho(f"\n{said}", dim=True, err=True, nl=False)


def _first_model(client: ChatClient) -> str:
    models = client.models()
    if not models:
        raise InputError(f"{without_secrets(client.url)} serves no model; name one with --model.")
    return models[0]


def _converse(chat: Chat) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() line editing and history

    click.secho(f"{escape_unsafe(chat.model)} at {without_secrets(chat.client.url)}. Ctrl-D or /quit ends.", dim=True)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.secho("\nCtrl-D or /quit ends.", dim=True)
            continue
        if line in ("/quit", "/exit"):
            return
        if line:
            chat.answer(line)
