"""The grammars of a request, remembered, as are the reasons why there is none."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable

from llmops.gateway.openai.grammar.errors import NotEnforceableError, TooCostlyError
from llmops.gateway.openai.grammar.language import Language, words
from llmops.gateway.openai.grammar.patterns import as_it_is, pattern_language
from llmops.gateway.openai.grammar.rules import Rules
from llmops.gateway.openai.grammar.schema import Compiler
from llmops.gateway.openai.grammar.work import STEPS, metered

# characters of grammars, and of what they were made of, that are kept
_REMEMBERED = 32_000_000
_Made = str | NotEnforceableError


def grammar_of(schema: str, strict: bool) -> str:
    """The grammar of a JSON Schema, given as JSON. Not `strict`: what cannot be enforced is left out.

    Raises NotEnforceableError, which names keyword and place.
    """
    return _remembered(("schema", schema, strict), lambda: Compiler(json.loads(schema), strict).grammar())


def pattern_grammar(pattern: str) -> str:
    """The grammar of texts that match `pattern` as a whole. Raises NotEnforceableError."""
    return _remembered(
        ("pattern", pattern, True), lambda: _language_grammar(pattern_language(pattern, as_it_is, whole=True))
    )


def choice_grammar(choices: tuple[str, ...]) -> str:
    """The grammar of one of `choices`. Raises NotEnforceableError."""
    return _remembered(("choice", repr(choices), True), lambda: _language_grammar(words(choices)))


def _language_grammar(language: Language) -> str:
    rules = Rules()
    return rules.text(rules.language(language))


_Key = tuple[str, str, bool]
_memory: OrderedDict[_Key, _Made] = OrderedDict()
_lock = threading.Lock()


def _remembered(key: _Key, make: Callable[[], str]) -> str:
    with _lock:
        made = _memory.get(key)
        if made is not None:
            _memory.move_to_end(key)
    if made is None:
        made = _tried(make)
        _remember(key, made)
    if isinstance(made, str):
        return made
    raise type(made)(str(made))


def _remember(key: _Key, made: _Made) -> None:
    with _lock:
        _memory[key] = made
        size = sum(map(_size, _memory.items()))
        while size > _REMEMBERED:
            size -= _size(_memory.popitem(last=False))


def _size(kept: tuple[_Key, _Made]) -> int:
    key, made = kept
    return len(key[1]) + len(str(made))


def _tried(make: Callable[[], str]) -> _Made:
    try:
        with metered(STEPS):
            return make()
    except (NotEnforceableError, TooCostlyError) as error:
        return NotEnforceableError(str(error))
    except RecursionError:
        return NotEnforceableError("it is nested too deeply")
