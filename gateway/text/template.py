"""Chat templates: Jinja2 in a sandbox, with the names that Hugging Face templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from llmops.errors import InputError
from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.text.allowance import TemplateTimeoutError, allowance
from llmops.gateway.text.guard import GuardedEnvironment

# the longest ones in use have 30,000
MAX_CHARACTERS = 1 << 17
# what a template can fail with on messages that its author did not think of
_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class TemplateRaisedError(jinja2.TemplateError):
    """The template itself refused the conversation through `raise_exception`."""


class GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks assistant text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, seconds: float = 1.0) -> None:
        """Rendering may take `seconds`. Raises InputError when `source` cannot be compiled."""
        self.source = source
        self._seconds = seconds
        self._special_tokens = dict(special_tokens)
        self._template = _compiled(source, seconds)
        # jinja2's is a chain of mappings, which each rendering would copy entry by entry
        self._template.globals = dict(self._template.globals)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. Raises InvalidRequestError (param messages) when the template refuses the messages."""
        context = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with allowance(self._seconds):
                return self._template.render(context)
        except TemplateTimeoutError as error:
            raise InvalidRequestError(
                f"The chat template needs more than {self._seconds:g} s for these messages.", param="messages"
            ) from error
        except TemplateRaisedError as error:
            raise InvalidRequestError(f"The chat template refused the messages: {error}", param="messages") from error
        except _FAILURES as error:
            raise InvalidRequestError(
                f"The chat template cannot render these messages: {error}", param="messages"
            ) from error


def _compiled(source: str, seconds: float) -> jinja2.Template:
    if len(source) > MAX_CHARACTERS:
        raise InputError(f"the chat template has more than {MAX_CHARACTERS} characters")
    try:
        # constants are evaluated here
        with allowance(seconds):
            return _environment().from_string(source)
    except (*_FAILURES, SyntaxError) as error:
        raise InputError(f"the chat template cannot be compiled: {type(error).__name__}: {error}") from error


def _environment() -> GuardedEnvironment:
    extensions = [GenerationTag, loopcontrols]
    environment = GuardedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions, filters={"tojson": to_json}
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja2's own filter escapes &, < and > for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRaisedError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
