"""The grammars of a request, remembered, as are the reasons why there is none."""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable

from llmops.gateway.answers.grammar.errors import NotEnforceableError, TooCostlyError
from llmops.gateway.answers.grammar.language import Language, words
from llmops.gateway.answers.grammar.patterns import as_it_is, pattern_language
from llmops.gateway.answers.grammar.rules import Rules
from llmops.gateway.answers.grammar.schema import Compiler
from llmops.gateway.answers.grammar.work import STEPS, metered
from llmops.gateway.text.threads import TooLongError, patience

# characters of grammars, and of what they were made of, that are kept
_REMEMBERED = 32_000_000
_ENTRY = 200
# steps that a thread for brief work makes; seconds are for what is not counted well
BRIEF = 50_000
_Made = str | NotEnforceableError
_Key = tuple[str, str, bool]


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


class Memory:
    """An LRU cache of grammars and of reasons why there is none, up to `size` characters."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._kept: OrderedDict[_Key, _Made] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: _Key) -> _Made | None:
        with self._lock:
            made = self._kept.get(key)
            if made is not None:
                self._kept.move_to_end(key)
            return made

    def put(self, key: _Key, made: _Made) -> None:
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = made
            self._left -= _size(key, made)
            while self._left < 0:
                self._left += _size(*self._kept.popitem(last=False))


def _size(key: _Key, made: _Made) -> int:
    return len(key[1]) + len(str(made)) + _ENTRY


_memory = Memory(_REMEMBERED)


def _remembered(key: _Key, make: Callable[[], str]) -> str:
    made = _memory.get(key)
    if made is None:
        made = _tried(make)
        _memory.put(key, made)
    if isinstance(made, str):
        return made
    raise type(made)(str(made))


def _tried(make: Callable[[], str]) -> _Made:
    """Raises TooLongError when it must be brief and is not."""
    seconds = patience()
    brief = seconds < math.inf
    try:
        with metered(min(BRIEF, STEPS), seconds) if brief else metered(STEPS):
            return make()
    except NotEnforceableError as error:
        return NotEnforceableError(str(error))
    except TooCostlyError as error:
        if brief and BRIEF < STEPS:
            raise TooLongError from None
        return NotEnforceableError(str(error))
    except RecursionError:
        return NotEnforceableError("it is nested too deeply")
