"""JSON Schemas, regular expressions and choices as grammars in xgrammar's notation.

A grammar allows only valid texts.

The engines' own conversion is not used, because it drops keywords that it does not know and gets
many others wrong (docs/decisions/0009-grammars.md).
"""

from llmops.gateway.generation.structured.grammar.compile_limits import NotEnforceableError
from llmops.gateway.generation.structured.grammar.grammar_cache import (
    choice_grammar,
    json_schema_grammar,
    regex_grammar,
)

__all__ = ["NotEnforceableError", "choice_grammar", "json_schema_grammar", "regex_grammar"]
