"""The grammars of a request, remembered."""

from __future__ import annotations

import json
from functools import lru_cache

from llmops.gateway.openai.grammar.language import any_of, literal
from llmops.gateway.openai.grammar.patterns import as_it_is, pattern_language
from llmops.gateway.openai.grammar.rules import Rules
from llmops.gateway.openai.grammar.schema import Compiler

_REMEMBERED = 256


@lru_cache(maxsize=_REMEMBERED)
def grammar_of(schema: str, strict: bool) -> str:
    """The grammar of a JSON Schema, given as JSON. Not `strict`: what cannot be enforced is left out.

    Raises NotEnforceableError, which names keyword and place.
    """
    return Compiler(json.loads(schema), strict).grammar()


@lru_cache(maxsize=_REMEMBERED)
def pattern_grammar(pattern: str) -> str:
    """The grammar of texts that match `pattern` as a whole. Raises NotEnforceableError."""
    rules = Rules()
    return rules.text(rules.language(pattern_language(pattern, as_it_is)))


@lru_cache(maxsize=_REMEMBERED)
def choice_grammar(choices: tuple[str, ...]) -> str:
    """The grammar of one of `choices`."""
    rules = Rules()
    return rules.text(rules.language(any_of(literal(choice) for choice in choices)))
