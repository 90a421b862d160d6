"""A JSON Schema as a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from llmops.gateway.generation.structured.grammar import container_rules, string_rules
from llmops.gateway.generation.structured.grammar.errors import NotEnforceableError, UnsatisfiableSchemaError
from llmops.gateway.generation.structured.grammar.grammar_builder import GrammarBuilder
from llmops.gateway.generation.structured.grammar.json_pointer import resolve_pointer
from llmops.gateway.generation.structured.grammar.number_rules import NumberRange, integer, number
from llmops.gateway.generation.structured.grammar.one_of_overlap import may_overlap
from llmops.gateway.generation.structured.grammar.regex_parser import finds
from llmops.gateway.generation.structured.grammar.regular_language import RegularLanguage, any_of, any_word, literal
from llmops.gateway.generation.structured.grammar.schema_merge import (
    UNENFORCED_KEYWORDS,
    FlatSchema,
    Schema,
    SchemaAlternatives,
    allowed_types,
    json_type,
    without_annotations,
)
from llmops.gateway.generation.structured.grammar.work_budget import spend_steps

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# what a schema without a type speaks of is what it is meant for
_TYPES_BY_KEYWORD = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
# more than any double has
_LONGEST_NUMBER = 400
_SCALARS = {"null": ["null"], "boolean": ["true", "false"]}


class SchemaCompiler:
    """Writes the rules of one schema. `strict`: what cannot be enforced is an error, else it is left out."""

    def __init__(self, root: Schema, strict: bool) -> None:
        self.rules = GrammarBuilder()
        self.strict = strict
        self._root = root
        self._references: dict[str, str] = {}
        self._resolved: dict[str, Schema] = {}
        self._ways = SchemaAlternatives(self.resolve, self._exclusive)
        self._waiting: list[str] = []
        self._direct: dict[str, set[str]] = {}
        self._inside: str | None = None

    def grammar(self) -> str:
        """The whole grammar. Raises NotEnforceableError."""
        root = self.value(self._root, "#", direct=False)
        while self._waiting:
            reference = self._waiting.pop()
            self._inside = reference
            self.rules.define(self._references[reference], self.value(self.resolve(reference), reference, direct=True))
        self._check_circular_references()
        return self.rules.text(root)

    def value(self, schema: Schema, path: str, direct: bool = False) -> str:
        """A rule, or several to choose from. `direct`: of a reference itself, with nothing around it."""
        try:
            return self._value(schema, path, direct)
        except NotEnforceableError as error:
            if not self.strict and not isinstance(error, UnsatisfiableSchemaError):
                return container_rules.anything(self.rules)
            if " at '" in str(error):
                raise
            raise type(error)(f"{error} at '{path}'") from None

    def _value(self, schema: Schema, path: str, direct: bool) -> str:
        spend_steps(10)
        given = without_annotations(schema)
        if set(given) == {"$ref"}:
            return self._reference(given["$ref"], direct)
        for key in ("anyOf", "oneOf", "allOf"):
            if set(given) == {key} and (key != "allOf" or len(given[key]) == 1):
                if key == "oneOf":
                    self._exclusive(given[key])
                return self._either([(part, f"{path}/{key}/{at}") for at, part in enumerate(given[key])], direct)
        return self._flat(self._ways(given), path)

    def _either(self, parts: Sequence[tuple[Schema, str]], direct: bool) -> str:
        """Containers and references are rules of their own; everything else becomes one rule."""
        apart, flats, problem = [], [], None
        for part, path in parts:
            try:
                if without_annotations(part).keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
                    apart.append(self.value(part, path, direct))
                else:
                    flats += self._ways(part)
            except UnsatisfiableSchemaError as error:
                problem = error
        if flats:
            try:
                apart.append(self._flat(flats, parts[0][1]))
            except UnsatisfiableSchemaError as error:
                problem = error
        if not apart:
            raise problem or UnsatisfiableSchemaError("nothing is allowed")
        spend_steps(sum(map(len, apart)) // 64)
        return " | ".join(dict.fromkeys(choice for part in apart for choice in part.split(" | ")))

    def _flat(self, flats: Sequence[FlatSchema], path: str) -> str:
        scalars: list[RegularLanguage] = []
        rules: list[str] = []
        problem: UnsatisfiableSchemaError | None = None
        for flat in flats:
            try:
                self._unenforced(flat, path)
                self._typed(flat, path, scalars, rules)
            except UnsatisfiableSchemaError as error:
                problem = error
        if scalars:
            try:
                rules.append(self.rules.language(any_of(scalars)))
            except UnsatisfiableSchemaError as error:
                problem = error
        if not rules:
            raise problem or UnsatisfiableSchemaError("nothing is allowed")
        return " | ".join(dict.fromkeys(rules))

    def _typed(self, flat: FlatSchema, path: str, scalars: list[RegularLanguage], rules: list[str]) -> None:
        if "enum" in flat:
            scalars.append(self._enum(flat))
            return
        types = allowed_types(flat) or {
            kind for kind, keys in _TYPES_BY_KEYWORD.items() if any(key in flat for key in keys)
        }
        if not types:
            rules.append(container_rules.anything(self.rules))
            return
        for kind in _TYPES:
            if kind not in types or (kind == "integer" and "number" in types):
                continue
            if kind in _SCALARS:
                scalars += map(literal, _SCALARS[kind])
            elif kind in ("integer", "number"):
                scalars.append(self._number(flat, kind))
            elif kind == "string":
                self._string(flat, scalars, rules)
            else:
                make = container_rules.array_rule if kind == "array" else container_rules.object_rule
                rules.append(make(self, flat, path))

    def _number(self, flat: Mapping[str, Any], kind: str) -> RegularLanguage:
        make = integer if kind == "integer" else number
        try:
            return make(number_range(flat), _decimal(flat, "multipleOf"))
        except UnsatisfiableSchemaError:
            raise
        except NotEnforceableError as error:
            self.refuse(str(error))
            return make(number_range(flat), None)

    def _string(self, flat: FlatSchema, scalars: list[RegularLanguage], rules: list[str]) -> None:
        least, most = int(flat.get("minLength", 0)), flat.get("maxLength")
        if most is not None and least > most:
            raise UnsatisfiableSchemaError(f"'minLength' {least} is more than 'maxLength' {most}")
        try:
            if "pattern" in flat:
                scalars.append(string_rules.pattern_string(flat["pattern"], least, most))
                return
            if flat.get("format") in string_rules.FORMAT_PATTERNS and most is None and least < 2:
                scalars.append(string_rules.format_string(flat["format"], least, most))
                return
        except NotEnforceableError as error:
            self.refuse(f"'pattern': {error}")
        sized = least or most is not None
        rules.append(
            string_rules.bounded_string(self.rules, least, most) if sized else string_rules.any_string(self.rules)
        )

    def _enum(self, flat: FlatSchema) -> RegularLanguage:
        values = [value for value in flat["enum"] if self._allowed(value, flat)]
        if not values:
            raise UnsatisfiableSchemaError("no value of 'enum' satisfies the rest of the schema")
        return any_word(string_rules.json_literal(value) for value in values)

    def _allowed(self, value: Any, flat: FlatSchema) -> bool:
        """Whether a listed value meets the rest of its schema."""
        types = allowed_types(flat)
        kind = json_type(value)
        if types is not None and kind not in types and not (kind == "integer" and "number" in types):
            return False
        if kind in ("integer", "number"):
            spend_steps(10)
            step, exact = _decimal(flat, "multipleOf"), Decimal(json.dumps(value))
            return number_range(flat).within(exact) and (step is None or Fraction(exact) % Fraction(step) == 0)
        if kind == "string":
            fits = flat.get("minLength", 0) <= len(value) <= flat.get("maxLength", len(value))
            return fits and ("pattern" not in flat or self.finds(flat["pattern"], value, "pattern"))
        if kind in ("array", "object") and any(key in flat for key in _TYPES_BY_KEYWORD[kind]):
            self.refuse(f"'enum' with {kind}s and other keywords for {kind}s")
        return True

    def finds(self, pattern: str, text: str, keyword: str) -> bool:
        """Whether `pattern` matches in `text`; True where that cannot be said and need not."""
        try:
            return finds(pattern, text)
        except NotEnforceableError as error:
            self.refuse(f"'{keyword}': {error}")
            return True

    def refuse(self, what: str) -> None:
        """Raises when everything must be enforced; `what` names the keyword."""
        if self.strict:
            raise NotEnforceableError(f"{what} cannot be enforced")

    def _unenforced(self, flat: Mapping[str, Any], path: str) -> None:
        found = next((key for key in UNENFORCED_KEYWORDS if key in flat), None)
        if found:
            self.refuse(f"'{found}'")

    def _exclusive(self, parts: Sequence[Schema]) -> None:
        if self.strict and may_overlap(parts, self._ways):
            self.refuse("'oneOf' whose parts may hold at the same time")

    def _reference(self, reference: str, direct: bool) -> str:
        if reference not in self._references:
            self._references[reference] = self.rules.reserve()
            self._waiting.append(reference)
        if direct and self._inside is not None:
            self._direct.setdefault(self._inside, set()).add(reference)
        return self._references[reference]

    def resolve(self, reference: str) -> Schema:
        """What a reference that was checked before points to."""
        if reference not in self._resolved:
            self._resolved[reference] = resolve_pointer(self._root, reference)
        return self._resolved[reference]

    def _check_circular_references(self) -> None:
        """A reference that leads to itself with nothing written in between would have no end."""
        for start in self._direct:
            seen: set[str] = set()
            stack = [start]
            while stack:
                for target in self._direct.get(stack.pop(), ()):
                    if target == start:
                        raise NotEnforceableError(f"'$ref' {start} only leads back to itself")
                    if target not in seen:
                        seen.add(target)
                        stack.append(target)


def number_range(flat: Mapping[str, Any]) -> NumberRange:
    """The tightest of minimum, maximum and their exclusive forms."""
    low, high = _decimal(flat, "minimum"), _decimal(flat, "maximum")
    above, below = _decimal(flat, "exclusiveMinimum"), _decimal(flat, "exclusiveMaximum")
    open_low = above is not None and (low is None or above >= low)
    open_high = below is not None and (high is None or below <= high)
    return NumberRange(above if open_low else low, below if open_high else high, open_low, open_high)


def _decimal(flat: Mapping[str, Any], key: str) -> Decimal | None:
    value = flat.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotEnforceableError(f"'{key}' must be a number; {json.dumps(value)}")
    if key == "multipleOf" and value <= 0:
        raise NotEnforceableError("'multipleOf' must be more than 0; this")
    text = json.dumps(value)
    if len(text) > _LONGEST_NUMBER:
        raise NotEnforceableError(f"'{key}' has more than {_LONGEST_NUMBER} digits; this")
    return Decimal(text)
