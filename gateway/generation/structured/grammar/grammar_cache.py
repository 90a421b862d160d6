"""The grammars of a request, remembered, as are the reasons why there is none."""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable

from llmops.gateway.generation.structured.grammar.errors import GrammarTooComplexError, NotEnforceableError
from llmops.gateway.generation.structured.grammar.grammar_builder import GrammarBuilder
from llmops.gateway.generation.structured.grammar.regex_parser import raw_character, regex_language
from llmops.gateway.generation.structured.grammar.regular_language import RegularLanguage, any_word
from llmops.gateway.generation.structured.grammar.schema_compiler import SchemaCompiler
from llmops.gateway.generation.structured.grammar.work_budget import MAX_STEPS, step_budget
from llmops.gateway.text.text_thread_pool import CpuLimitError, thread_cpu_limit

# characters of grammars, and of what they were made of, that are kept
_CACHE_CHARACTERS = 32_000_000
_ENTRY_OVERHEAD = 200
# steps that a thread for brief work makes; seconds are for what is not counted well
SHORT_LANE_STEPS = 50_000
_CompileResult = str | NotEnforceableError
_CacheKey = tuple[str, str, bool]


def json_schema_grammar(schema: str, strict: bool) -> str:
    """The grammar of a JSON Schema, given as JSON. Not `strict`: what cannot be enforced is left out.

    Raises NotEnforceableError, which names keyword and place.
    """
    return _cached(("schema", schema, strict), lambda: SchemaCompiler(json.loads(schema), strict).grammar())


def regex_grammar(pattern: str) -> str:
    """The grammar of texts that match `pattern` as a whole. Raises NotEnforceableError."""
    return _cached(
        ("pattern", pattern, True), lambda: _language_grammar(regex_language(pattern, raw_character, whole=True))
    )


def choice_grammar(choices: tuple[str, ...]) -> str:
    """The grammar of one of `choices`. Raises NotEnforceableError."""
    return _cached(("choice", repr(choices), True), lambda: _language_grammar(any_word(choices)))


def _language_grammar(language: RegularLanguage) -> str:
    rules = GrammarBuilder()
    return rules.text(rules.language(language))


class GrammarCache:
    """An LRU cache of grammars and of reasons why there is none, up to `size` characters."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._kept: OrderedDict[_CacheKey, _CompileResult] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: _CacheKey) -> _CompileResult | None:
        with self._lock:
            made = self._kept.get(key)
            if made is not None:
                self._kept.move_to_end(key)
            return made

    def put(self, key: _CacheKey, made: _CompileResult) -> None:
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = made
            self._left -= _size(key, made)
            while self._left < 0:
                self._left += _size(*self._kept.popitem(last=False))


def _size(key: _CacheKey, made: _CompileResult) -> int:
    return len(key[1]) + len(str(made)) + _ENTRY_OVERHEAD


_cache = GrammarCache(_CACHE_CHARACTERS)


def _cached(key: _CacheKey, make: Callable[[], str]) -> str:
    made = _cache.get(key)
    if made is None:
        made = _compile_within_budget(make)
        _cache.put(key, made)
    if isinstance(made, str):
        return made
    raise type(made)(str(made))


def _compile_within_budget(make: Callable[[], str]) -> _CompileResult:
    """Raises CpuLimitError when it must be brief and is not."""
    seconds = thread_cpu_limit()
    brief = seconds < math.inf
    try:
        with step_budget(min(SHORT_LANE_STEPS, MAX_STEPS), seconds) if brief else step_budget(MAX_STEPS):
            return make()
    except NotEnforceableError as error:
        return NotEnforceableError(str(error))
    except GrammarTooComplexError as error:
        if brief and SHORT_LANE_STEPS < MAX_STEPS:
            raise CpuLimitError from None
        return NotEnforceableError(str(error))
    except RecursionError:
        return NotEnforceableError("it is nested too deeply")
