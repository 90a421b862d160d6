"""Chat templates: Jinja2 in a sandbox, with the names that Hugging Face templates expect."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from time import monotonic
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from llmops.errors import InputError
from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.text.control_tokens import ControlTokens
from llmops.gateway.text.render_budget import TemplateTimeoutError, within_budget
from llmops.gateway.text.rendered_prompt import RenderedPrompt
from llmops.gateway.text.template_marker import UNMARKED, ControlTokenMarker
from llmops.gateway.text.template_sandbox import LimitedSandbox
from llmops.gateway.text.text_thread_pool import CpuLimitError, thread_cpu_limit

log = logging.getLogger(__name__)

_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
_CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
_WITH_CALL = [
    *_CONVERSATION,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "d", "name": "f", "tool_call_id": "abcdefghi"},
]
#: what a template is tried on when it is loaded; it may refuse some of it
SAMPLE_CONVERSATIONS: tuple[dict[str, Any], ...] = tuple(
    {"messages": [*system, *messages], "tools": tools, "add_generation_prompt": more}
    for system in ([], [{"role": "system", "content": "s"}], [{"role": "developer", "content": "s"}])
    for messages, tools in ((_CONVERSATION, None), (_CONVERSATION, [_TOOL]), (_WITH_CALL, [_TOOL]))
    for more in (True, False)
)

# how long a template that was too slow for the event loop is not rendered there again
SLOW_SECONDS = 10.0
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

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        seconds: float = 1.0,
        controls: ControlTokens | None = None,
    ) -> None:
        """Rendering may take `seconds`. With `controls`, prompts say which control tokens are the template's own.

        Raises InputError when `source` cannot be compiled.
        """
        self.source = source
        self._seconds = seconds
        self._slow_until = 0.0
        self._special_tokens = dict(special_tokens)
        self._controls = controls
        self._template = _compiled(source, seconds)
        self._marked: jinja2.Template | None = None
        self._composed = frozenset[str]()
        if controls is not None:
            self._follow(controls)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Raises InvalidRequestError (param messages) when the template refuses the messages."""
        given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        context = {**(variables or {}), **given}
        if self._controls is None:
            return RenderedPrompt(self._rendered(self._template, {**self._special_tokens, **context}))
        if self._marked is None:
            _refuse_control_tokens(self._controls, context)
            text = self._rendered(self._template, {**self._special_tokens, **context})
            return self._controls.with_composed(
                RenderedPrompt(text), frozenset(t for _, t in self._controls.texts_in(text))
            )
        prompt = self._controls.read(self._rendered(self._marked, {**self._marked_tokens, **context}))
        return self._controls.with_composed(prompt, self._composed) if self._composed else prompt

    @property
    def is_slow(self) -> bool:
        """Whether it took too long for the event loop lately."""
        return self._slow_until > 0 and monotonic() < self._slow_until

    def own(self, text: str) -> RenderedPrompt:
        """A text that the gateway adds to a prompt, whose control tokens are meant."""
        return RenderedPrompt(text) if self._controls is None else self._controls.read(self._controls.mark(text))

    def _rendered(self, template: jinja2.Template, context: Mapping[str, Any]) -> str:
        brief = thread_cpu_limit()
        try:
            return within_budget(min(self._seconds, brief), template.render, context)
        except TemplateTimeoutError as error:
            if brief < self._seconds:
                self._slow_until = monotonic() + SLOW_SECONDS
                raise CpuLimitError from None
            raise InvalidRequestError(
                f"The chat template needs more than {self._seconds:g} s for these messages.", param="messages"
            ) from error
        except TemplateRaisedError as error:
            said = f"The chat template refused the messages: {self._unmark(str(error))}"
            raise InvalidRequestError(said, param="messages") from error
        except _FAILURES as error:
            said = f"The chat template cannot render these messages: {self._unmark(str(error))}"
            raise InvalidRequestError(said, param="messages") from error

    def _unmark(self, text: str) -> str:
        return text if self._controls is None else self._controls.unmark(text)

    def _follow(self, controls: ControlTokens) -> None:
        """Compile the template with its control tokens marked, and check on a few conversations that this works."""
        self._marked = _compiled(self.source, self._seconds, controls, self._special_tokens)
        self._marked_tokens = {name: controls.mark(text) for name, text in self._special_tokens.items()}
        composed: set[str] = set()
        for given in SAMPLE_CONVERSATIONS:
            try:
                plain = self._rendered(self._template, {**self._special_tokens, **given})
                prompt = controls.read(self._rendered(self._marked, {**self._marked_tokens, **given}))
            except InvalidRequestError:
                continue
            if prompt.text != plain:
                log.warning("the chat template changes its control tokens: texts that hold one are refused")
                self._marked = None
                return
            own = {at for at, _ in prompt.own or ()}
            composed.update(text for at, text in controls.texts_in(plain) if at not in own)
        self._composed = frozenset(composed)
        if composed:
            log.warning("the chat template writes %s in parts: in clients' texts they stay tokens", sorted(composed))


def _refuse_control_tokens(controls: ControlTokens, context: Mapping[str, Any]) -> None:
    """Where the template's own control tokens cannot be followed, no text may hold one."""
    for text in _texts(context):
        if controls.found_in(text):
            said = "The messages hold the text of a control token, which this model's template cannot keep apart."
            raise InvalidRequestError(said, param="messages")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _texts(key)
            yield from _texts(one)
    elif isinstance(value, Sequence):
        for one in value:
            yield from _texts(one)


def _compiled(
    source: str,
    seconds: float,
    controls: ControlTokens | None = None,
    special_tokens: Mapping[str, str] = MappingProxyType({}),
) -> jinja2.Template:
    if len(source) > MAX_CHARACTERS:
        raise InputError(f"the chat template has more than {MAX_CHARACTERS} characters")
    marker = ControlTokenMarker(controls, special_tokens) if controls is not None else None
    try:
        # constants are evaluated here
        template = within_budget(seconds, _environment(controls, marker).from_string, source)
    except (*_FAILURES, SyntaxError) as error:
        raise InputError(f"the chat template cannot be compiled: {type(error).__name__}: {error}") from error
    # jinja2's is a chain of mappings, which each rendering would copy entry by entry
    template.globals = dict(template.globals)
    return template


def _environment(controls: ControlTokens | None, marker: ControlTokenMarker | None) -> LimitedSandbox:
    extensions = [GenerationTag, loopcontrols]
    environment = LimitedSandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=extensions,
        filters={"tojson": to_json},
        prepare=marker.mark if marker else None,
    )
    if controls is not None:
        environment.filters[UNMARKED] = lambda value: controls.unmark(value) if isinstance(value, str) else value
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
