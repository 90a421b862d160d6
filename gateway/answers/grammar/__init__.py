"""JSON Schemas, regular expressions and choices as grammars in xgrammar's notation: what they let through is valid.

Engines' own conversion is not used: it drops what it does not know and gets much of what it knows wrong (0607).
"""

from llmops.gateway.answers.grammar.enforce import choice_grammar, grammar_of, pattern_grammar
from llmops.gateway.answers.grammar.errors import NotEnforceableError

__all__ = ["NotEnforceableError", "choice_grammar", "grammar_of", "pattern_grammar"]
