"""Descriptions of invalid values for users, in place of pydantic's messages for programmers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_BRANCH = re.compile(
    r"(constrained-|literal\[|function-|list\[|dict\[|tuple\[|lax-or-strict|json-or-python|is-instance)"
    r"|(int|str|float|bool|none|nullable)$"
)
_FIXED = {
    "missing": "it is required",
    "extra_forbidden": "it is unknown",
    "none_required": "it must be null",
    "string_type": "it must be a text",
    "string_unicode": "it must be a text of valid Unicode",
    "string_sub_type": "it must be a text",
    "int_type": "it must be a whole number",
    "int_parsing": "it must be a whole number",
    "int_parsing_size": "it is too large",
    "int_from_float": "it must be a whole number",
    "float_type": "it must be a number",
    "float_parsing": "it must be a number",
    "finite_number": "it must be a finite number",
    "decimal_parsing": "it must be a number",
    "decimal_type": "it must be a number",
    "bool_type": "it must be true or false",
    "bool_parsing": "it must be true or false",
    "list_type": "it must be a list",
    "tuple_type": "it must be a list",
    "set_type": "it must be a list",
    "dict_type": "it must be a mapping of names to values",
    "model_type": "it must be a mapping of names to values",
    "model_attributes_type": "it must be a mapping of names to values",
    "dataclass_type": "it must be a mapping of names to values",
    "path_type": "it must be a path",
    "import_error": "it must be module:name of something that can be imported",
    "datetime_parsing": "it must be a time such as 2027-01-31T00:00:00Z",
    "datetime_from_date_parsing": "it must be a time such as 2027-01-31T00:00:00Z",
    "timezone_naive": "it must have a time zone, such as 2027-01-31T00:00:00Z",
    "uuid_parsing": "it must be a UUID",
}
_BOUNDS = {
    "greater_than": ("gt", "it must be greater than {}"),
    "greater_than_equal": ("ge", "it must be at least {}"),
    "less_than": ("lt", "it must be less than {}"),
    "less_than_equal": ("le", "it must be at most {}"),
    "multiple_of": ("multiple_of", "it must be a multiple of {}"),
    "string_too_long": ("max_length", "it must have at most {} characters"),
    "string_pattern_mismatch": ("pattern", "it must match the regular expression {}"),
    "literal_error": ("expected", "it must be {}"),
    "enum": ("expected", "it must be {}"),
}


def explain_error(error: ErrorDetails) -> str:
    """Return a clause that says what an invalid value must be, such as "it must be at least 1"."""
    kind, context = error["type"], error.get("ctx") or {}
    if kind in _FIXED:
        return _FIXED[kind]
    if kind in _BOUNDS:
        name, clause = _BOUNDS[kind]
        return clause.format(context.get(name))
    if kind in ("too_short", "string_too_short"):
        minimum = context.get("min_length", 1)
        unit = "characters" if kind.startswith("string") else "entries"
        return "it must not be empty" if minimum == 1 else f"it must have at least {minimum} {unit}"
    if kind == "too_long":
        return f"it must have at most {context.get('max_length')} entries"
    if kind == "union_tag_invalid":
        choices = str(context.get("expected_tags"))
        return f"its {context.get('discriminator')} must be one of {choices}, not {context.get('tag')!r}"
    if kind == "union_tag_not_found":
        return f"it needs a {context.get('discriminator')}"
    text = error["msg"]
    return text.removeprefix("Value error, ").removeprefix("Assertion failed, ").rstrip(".")


def error_path(error: ErrorDetails) -> str:
    """Return the dotted path of an invalid value, such as `models.0.name`.

    The path leaves out the names that pydantic adds for the branches of a union.
    """
    return ".".join(str(part) for part in error["loc"] if not _BRANCH.match(str(part)))


def explain_first_error(errors: Sequence[ErrorDetails]) -> tuple[str, str]:
    """Return the path of the first invalid value, and a clause that says what the value must be.

    For a union, the clause joins the requirements of all branches.
    """
    path = error_path(errors[0])
    clauses = dict.fromkeys(explain_error(error) for error in errors if error_path(error) == path)
    return path, " or ".join(clauses)
