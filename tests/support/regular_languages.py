"""The texts of a regular language, found character by character."""

from llmops.gateway.generation.structured.grammar.regular_language import RegularLanguage, derivative


def contains(language: RegularLanguage, text: str) -> bool:
    """Return True if `text` belongs to `language`."""
    for one in text:
        language = derivative(language, ord(one))
    return language.nullable
