"""The grammars of a request, remembered, as are the reasons why there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache

from llmops.gateway.openai.grammar.language import words
from llmops.gateway.openai.grammar.patterns import as_it_is, pattern_language
from llmops.gateway.openai.grammar.rules import NotEnforceableError, Rules
from llmops.gateway.openai.grammar.schema import Compiler

_REMEMBERED = 256


def grammar_of(schema: str, strict: bool) -> str:
    """The grammar of a JSON Schema, given as JSON. Not `strict`: what cannot be enforced is left out.

    Raises NotEnforceableError, which names keyword and place.
    """
    return _or_raise(_schema_grammar(schema, strict))


def pattern_grammar(pattern: str) -> str:
    """The grammar of texts that match `pattern` as a whole. Raises NotEnforceableError."""
    return _or_raise(_pattern_grammar(pattern))


def choice_grammar(choices: tuple[str, ...]) -> str:
    """The grammar of one of `choices`. Raises NotEnforceableError."""
    return _or_raise(_choice_grammar(choices))


@lru_cache(maxsize=_REMEMBERED)
def _schema_grammar(schema: str, strict: bool) -> str | NotEnforceableError:
    return _made(lambda: Compiler(json.loads(schema), strict).grammar())


@lru_cache(maxsize=_REMEMBERED)
def _pattern_grammar(pattern: str) -> str | NotEnforceableError:
    def make() -> str:
        rules = Rules()
        return rules.text(rules.language(pattern_language(pattern, as_it_is, whole=True)))

    return _made(make)


@lru_cache(maxsize=_REMEMBERED)
def _choice_grammar(choices: tuple[str, ...]) -> str | NotEnforceableError:
    def make() -> str:
        rules = Rules()
        return rules.text(rules.language(words(choices)))

    return _made(make)


def _made(make: Callable[[], str]) -> str | NotEnforceableError:
    try:
        return make()
    except NotEnforceableError as error:
        return error.with_traceback(None)
    except RecursionError:
        return NotEnforceableError("it is nested too deeply")


def _or_raise(made: str | NotEnforceableError) -> str:
    if isinstance(made, str):
        return made
    raise type(made)(str(made))
