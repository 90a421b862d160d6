"""JSON Schemas, regular expressions and choices as grammars in xgrammar's notation: what they let through is valid.

Engines' own conversion is not used: it drops what it does not know and gets much of what it knows wrong (0607).
"""

from llmops.gateway.generation.structured.grammar.errors import NotEnforceableError
from llmops.gateway.generation.structured.grammar.grammar_cache import (
    choice_grammar,
    json_schema_grammar,
    regex_grammar,
)

__all__ = ["NotEnforceableError", "choice_grammar", "json_schema_grammar", "regex_grammar"]
