"""A compiler of schemas, regular expressions and choices to grammars, with a cache.

The cache keeps grammars and the reasons of failures.
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

#: Maximum size of the cache in characters of grammars and their sources, which bounds the memory.
_CACHE_CHARACTERS = 32_000_000
#: Characters that a cache entry counts for besides its grammar and source.
_ENTRY_OVERHEAD = 200

#: Maximum steps of work in the short lane of the text threads. The lane's limit in seconds is only
#: for work that steps do not measure well.
SHORT_LANE_STEPS = 50_000

_CompileResult = str | NotEnforceableError
_CacheKey = tuple[str, str, bool]


def json_schema_grammar(schema: str, strict: bool) -> str:
    """Return the grammar of a JSON Schema.

    Args:
        schema: The schema as JSON.
        strict: Refuse keywords that cannot be enforced, instead of ignoring them.

    Raises:
        NotEnforceableError: The schema has no grammar. The message names the keyword and its place.
    """
    return _cached(("schema", schema, strict), lambda: SchemaCompiler(json.loads(schema), strict).grammar())


def regex_grammar(pattern: str) -> str:
    """Return the grammar of texts that match `pattern` as a whole.

    Raises:
        NotEnforceableError: The pattern has no grammar.
    """
    return _cached(
        ("pattern", pattern, True), lambda: _language_grammar(regex_language(pattern, raw_character, whole=True))
    )


def choice_grammar(choices: tuple[str, ...]) -> str:
    """Return the grammar that allows only the texts in `choices`.

    Raises:
        NotEnforceableError: The choices have no grammar.
    """
    return _cached(("choice", repr(choices), True), lambda: _language_grammar(any_word(choices)))


def _language_grammar(language: RegularLanguage) -> str:
    rules = GrammarBuilder()
    return rules.text(rules.language(language))


class GrammarCache:
    """An LRU cache of grammars and of reasons of failures, of up to `size` characters.

    The cache is safe to use in threads.
    """

    def __init__(self, size: int) -> None:
        self._room = size
        self._entries: OrderedDict[_CacheKey, _CompileResult] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: _CacheKey) -> _CompileResult | None:
        """Return the cached result for `key`; None if the cache has none."""
        with self._lock:
            result = self._entries.get(key)
            if result is not None:
                self._entries.move_to_end(key)
            return result

    def put(self, key: _CacheKey, result: _CompileResult) -> None:
        """Cache a result, and drop the results that were not used for the longest time."""
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
    """Return the grammar, or the error that explains why there is no grammar.

    Raises:
        CpuLimitError: The work takes too long for the short lane.
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
        return NotEnforceableError("it is nested too deeply; use fewer levels")
