"""Chat templates, rendered with Jinja2 in a sandbox.

Templates can use the names that Hugging Face's templates expect.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from time import monotonic
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols

from llmops.chat_template_tags import MAX_TEMPLATE_CHARACTERS, GenerationTag
from llmops.errors import InputError
from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.text.control_tokens import UNMARK_FILTER, ControlTokenMarker, ControlTokens, RenderedPrompt
from llmops.gateway.text.render_budget import TemplateTimeoutError, check_result_size, text_size, within_budget
from llmops.gateway.text.template_sandbox import LimitedSandbox
from llmops.gateway.text.text_thread_pool import CpuLimitError, thread_limit

_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
_CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
_CONVERSATION_WITH_CALL = [
    *_CONVERSATION,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "d", "name": "f", "tool_call_id": "abcdefghi"},
]

#: Conversations with which a template is tried when it is loaded. A template may refuse some of
#: them.
SAMPLE_CONVERSATIONS: tuple[dict[str, Any], ...] = tuple(
    {"messages": [*system, *messages], "tools": tools, "add_generation_prompt": add_generation_prompt}
    for system in ([], [{"role": "system", "content": "s"}], [{"role": "developer", "content": "s"}])
    for messages, tools in ((_CONVERSATION, None), (_CONVERSATION, [_TOOL]), (_CONVERSATION_WITH_CALL, [_TOOL]))
    for add_generation_prompt in (True, False)
)

#: Seconds for which a template is not rendered on the event loop after it was too slow there.
#: Otherwise, each of its requests would delay other clients again.
SLOW_SECONDS = 10.0

#: Maximum number of characters that JSON adds per nesting level or separator. Templates use up to
#: 4; more would let a small value become a large text.
_MAX_JSON_PADDING = 64

#: Maximum length of a date format, in characters. Longer formats are not in use, and wide fields
#: make large texts.
_MAX_DATE_FORMAT = 256

#: Exceptions of a template for messages that its author did not expect.
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
    """An error for a conversation that the template refused with `raise_exception`."""


class ChatTemplate:
    """A compiled chat template with the special tokens that it may name.

    Attributes:
        source: The Jinja2 source.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        seconds: float = 1.0,
        controls: ControlTokens | None = None,
    ) -> None:
        """Compile a template.

        Args:
            source: The Jinja2 source.
            special_tokens: The texts of special tokens, by their names such as `bos_token`.
            seconds: The CPU seconds that a rendering may take.
            controls: The tokenizer's control tokens. With them, rendered prompts list the control
                tokens that the template wrote.

        Raises:
            InputError: `source` cannot be compiled, or its control tokens cannot be marked.
        """
        self.source = source
        self._seconds = seconds
        self._slow_until = 0.0
        self._special_tokens = dict(special_tokens)
        self._controls = controls
        self._template = _compile(source, seconds)
        if controls is not None:
            self._compile_marked(controls)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Return the prompt for `messages`.

        Args:
            messages: The chat messages.
            tools: The tools that the model may call.
            add_generation_prompt: True if the prompt ends with the beginning of an assistant
                message.
            variables: Further names that the template may use.

        Raises:
            InvalidRequestError: The template refuses the messages or needs too much time or memory.
            CpuLimitError: The rendering exceeded the limit of this thread, and can be repeated on
                another thread.
        """
        given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        context = {**(variables or {}), **given}
        if self._controls is None:
            return RenderedPrompt(self._render(self._template, {**self._special_tokens, **context}))
        return self._controls.read(self._render(self._marked, {**self._marked_tokens, **context}))

    @property
    def is_slow(self) -> bool:
        """Return True if the template was recently too slow for the event loop."""
        return self._slow_until > 0 and monotonic() < self._slow_until

    def own(self, text: str) -> RenderedPrompt:
        """Return `text`, which the gateway itself appends to a prompt, as a rendered prompt.

        Control tokens in the text count as tokens that the template wrote.
        """
        return RenderedPrompt(text) if self._controls is None else self._controls.read(self._controls.mark(text))

    def _render(self, template: jinja2.Template, context: Mapping[str, Any]) -> str:
        limit = thread_limit.cpu_seconds
        try:
            text = within_budget(min(self._seconds, limit), template.render, context)
            # A template, or JSON in a text, can write half of a surrogate pair, which has no
            # encoding.
            text.encode()
            return text
        except TemplateTimeoutError:
            if limit < self._seconds:
                self._slow_until = monotonic() + SLOW_SECONDS
                raise CpuLimitError from None
            message, cause = (
                f"The chat template needs more than {self._seconds:g} s for these messages; shorten them.",
                None,
            )
        except UnicodeEncodeError:
            message, cause = (
                "The chat template cannot render these messages, because a text in them, such as an argument of a tool "
                "call, has half of a surrogate pair (\\ud800 to \\udfff); send whole characters.",
                None,
            )
        except _FAILURES as error:
            reason = str(error) if self._controls is None else self._controls.unmark(str(error))
            verb = "refused the" if isinstance(error, TemplateRaisedError) else "cannot render these"
            message = f"The chat template {verb} messages: {reason}"
            cause, error.__context__ = error.with_traceback(None), None
        # The error's frames form cycles with the template's values. Cycles with values of 100 MB
        # would not trigger a collection by themselves.
        gc.collect(1)
        raise InvalidRequestError(message, param="messages") from cause

    def _compile_marked(self, controls: ControlTokens) -> None:
        """Compile the template with marks before its control tokens.

        Raises:
            InputError: Marks change the text that the template renders, or the template writes a
                control token that has no mark.
        """
        self._marked = _compile(self.source, self._seconds, controls, self._special_tokens)
        self._marked_tokens = {name: controls.mark(text) for name, text in self._special_tokens.items()}
        for sample in SAMPLE_CONVERSATIONS:
            try:
                plain = self._render(self._template, {**self._special_tokens, **sample})
                prompt = controls.read(self._render(self._marked, {**self._marked_tokens, **sample}))
            except InvalidRequestError:
                continue
            if prompt.text != plain or controls.places_in(plain) != [at for at, _ in prompt.own or ()]:
                raise InputError(
                    "The chat template changes its control tokens or writes them in parts, so that they cannot be told "
                    "from text of clients; use a template that writes them unchanged and whole, or set "
                    "control_tokens_in_messages for this model"
                )


def _compile(
    source: str,
    seconds: float,
    controls: ControlTokens | None = None,
    special_tokens: Mapping[str, str] = MappingProxyType({}),
) -> jinja2.Template:
    """Return the compiled template, with marked control tokens if `controls` are given.

    Args:
        source: The text of the template.
        seconds: The CPU seconds after which the compilation fails.
        controls: The control tokens to mark, or None.
        special_tokens: The texts of special tokens, by their names such as `bos_token`.

    Raises:
        InputError: The template is too long or cannot be compiled.
    """
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        raise InputError(f"The chat template has more than {MAX_TEMPLATE_CHARACTERS} characters; shorten it")
    try:
        # Compiling evaluates constant expressions, which can take as long as rendering.
        template = within_budget(seconds, _environment(controls, special_tokens).from_string, source)
    except (*_FAILURES, SyntaxError) as error:
        raise InputError(
            f"The chat template cannot be compiled ({type(error).__name__}: {error}); correct it"
        ) from error
    # Jinja's globals are a chain of mappings, which each rendering would copy entry by entry.
    template.globals = dict(template.globals)
    return template


def _environment(controls: ControlTokens | None, special_tokens: Mapping[str, str]) -> LimitedSandbox:
    marker = {"prepare": ControlTokenMarker(controls, special_tokens).mark} if controls is not None else {}
    environment = LimitedSandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationTag, loopcontrols],
        filters={"tojson": to_json},
        **marker,
    )
    if controls is not None:
        environment.filters[UNMARK_FILTER] = lambda value: controls.unmark(value) if isinstance(value, str) else value
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
    """Return a value as JSON, without the HTML escapes of Jinja2's own filter.

    Models were not trained on text in which &, < and > are escaped.

    Raises:
        SecurityError: The text would be too long.
    """
    size, padding = text_size(value), len(indent) if isinstance(indent, str) else indent or 0
    if max(padding, *map(len, separators or ("",))) > _MAX_JSON_PADDING:
        raise SecurityError("an indentation or separator of the template's JSON is too long")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if not padding:
        check_result_size(6 * size if ensure_ascii else size)
        return encoder.encode(value)
    parts, size = [], 0
    for part in encoder.iterencode(value):
        size += len(part)
        check_result_size(size)
        parts.append(part)
    return "".join(parts)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRaisedError(message)


def _strftime_now(form: str) -> str:
    # Python's buffer grows to 256 times the format's size if the format has wide fields.
    if len(form) > _MAX_DATE_FORMAT:
        raise SecurityError("the template's format of a date is too long")
    return datetime.now().strftime(form)
