"""A compiler of schemas, regular expressions and choices to grammars, with a cache.

The cache keeps the results and the failures.
"""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable

from llmops.gateway.generation.structured.grammar.compile_limits import (
    MAX_STEPS,
    GrammarTooComplexError,
    NotEnforceableError,
    step_budget,
)
from llmops.gateway.generation.structured.grammar.grammar_builder import GrammarBuilder
from llmops.gateway.generation.structured.grammar.regex_parser import raw_character, regex_language
from llmops.gateway.generation.structured.grammar.regular_language import RegularLanguage, any_word
from llmops.gateway.generation.structured.grammar.schema_compiler import SchemaCompiler
from llmops.gateway.text.text_thread_pool import CpuLimitError, thread_limit

#: Characters of the grammars, and of their sources, that are kept; and what an entry counts for
#: besides.
_CACHE_CHARACTERS = 32_000_000
_ENTRY_OVERHEAD = 200

#: Steps of work in the short lane. The lane's limit in seconds is for work that is not counted
#: well.
SHORT_LANE_STEPS = 50_000

_CompileResult = str | NotEnforceableError
_CacheKey = tuple[str, str, bool]


def json_schema_grammar(schema: str, strict: bool) -> str:
    """Return the grammar of a JSON Schema.

    Args:
        schema: The schema as JSON.
        strict: Refuse keywords that cannot be enforced, instead of ignoring them.

    Raises:
        NotEnforceableError: There is no grammar. The message names keyword and place.
    """
    return _cached(("schema", schema, strict), lambda: SchemaCompiler(json.loads(schema), strict).grammar())


def regex_grammar(pattern: str) -> str:
    """Return the grammar of texts that match `pattern` as a whole.

    Raise NotEnforceableError if there is none.
    """
    return _cached(
        ("pattern", pattern, True), lambda: _language_grammar(regex_language(pattern, raw_character, whole=True))
    )


def choice_grammar(choices: tuple[str, ...]) -> str:
    """Return the grammar of one of `choices`. Raise NotEnforceableError if there is none."""
    return _cached(("choice", repr(choices), True), lambda: _language_grammar(any_word(choices)))


def _language_grammar(language: RegularLanguage) -> str:
    rules = GrammarBuilder()
    return rules.text(rules.language(language))


class GrammarCache:
    """An LRU cache of grammars, and of reasons why there is none, of up to `size` characters.

    Safe to use in threads.
    """

    def __init__(self, size: int) -> None:
        self._room = size
        self._entries: OrderedDict[_CacheKey, _CompileResult] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: _CacheKey) -> _CompileResult | None:
        """Return the result for `key`, None if it is not known."""
        with self._lock:
            result = self._entries.get(key)
            if result is not None:
                self._entries.move_to_end(key)
            return result

    def put(self, key: _CacheKey, result: _CompileResult) -> None:
        """Keep a result, and drop those that were not used for the longest time."""
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = result
            self._room -= _entry_size(key, result)
            while self._room < 0:
                self._room += _entry_size(*self._entries.popitem(last=False))


def _entry_size(key: _CacheKey, result: _CompileResult) -> int:
    return len(key[1]) + len(str(result)) + _ENTRY_OVERHEAD


_cache = GrammarCache(_CACHE_CHARACTERS)


def _cached(key: _CacheKey, compile_grammar: Callable[[], str]) -> str:
    result = _cache.get(key)
    if result is None:
        result = _compile_within_budget(compile_grammar)
        _cache.put(key, result)
    if isinstance(result, str):
        return result
    raise type(result)(str(result))


def _compile_within_budget(compile_grammar: Callable[[], str]) -> _CompileResult:
    """Return the grammar or the reason why there is none.

    Raise CpuLimitError if it takes too long for this thread.
    """
    seconds = thread_limit.cpu_seconds
    is_short = seconds < math.inf
    try:
        with step_budget(min(SHORT_LANE_STEPS, MAX_STEPS), seconds) if is_short else step_budget(MAX_STEPS):
            return compile_grammar()
    except NotEnforceableError as error:
        return NotEnforceableError(str(error))
    except GrammarTooComplexError as error:
        if is_short and SHORT_LANE_STEPS < MAX_STEPS:
            raise CpuLimitError from None
        return NotEnforceableError(str(error))
    except RecursionError:
        return NotEnforceableError("it is nested too deeply")
