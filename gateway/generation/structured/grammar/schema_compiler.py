"""The compiler of JSON Schemas to grammars."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from llmops.gateway.generation.structured.grammar import string_rules
from llmops.gateway.generation.structured.grammar.compile_limits import (
    NotEnforceableError,
    UnsatisfiableSchemaError,
    spend_steps,
)
from llmops.gateway.generation.structured.grammar.container_rules import any_value_rule, array_rule, object_rule
from llmops.gateway.generation.structured.grammar.grammar_builder import GrammarBuilder
from llmops.gateway.generation.structured.grammar.number_rules import NumberRange, integer_language, number_language
from llmops.gateway.generation.structured.grammar.regular_language import RegularLanguage, any_of, any_word, literal
from llmops.gateway.generation.structured.grammar.schema_merge import (
    APPLICATOR_KEYWORDS,
    UNENFORCED_KEYWORDS,
    FlatSchema,
    Schema,
    SchemaAlternatives,
    allowed_types,
    json_type,
    may_overlap,
    without_annotations,
)
from llmops.gateway.generation.structured.schema_references import resolve_pointer

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_SCALARS = {"null": ["null"], "boolean": ["true", "false"]}

#: Keywords by the type that a schema without `type` is meant for if it has one of them.
_TYPES_BY_KEYWORD = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}

#: Maximum length of a bound in characters: more than any double has.
_MAX_NUMBER_LENGTH = 400


class SchemaCompiler:
    """The compiler of one schema."""

    def __init__(self, root: Schema, strict: bool) -> None:
        """Prepare to compile the schema `root`.

        A keyword that cannot be enforced is an error if `strict` is True; otherwise the keyword is
        ignored.
        """
        self.rules = GrammarBuilder()
        self.strict = strict
        self._root = root
        self._rule_of_reference: dict[str, str] = {}
        self._resolved: dict[str, Schema] = {}
        self._alternatives = SchemaAlternatives(self.resolve, self._check_one_of)
        self._waiting: list[str] = []
        # References reached from a reference without any keyword between them.
        self._direct: dict[str, set[str]] = {}
        self._inside: str | None = None

    def grammar(self) -> str:
        """Return the grammar of the schema.

        Raises:
            NotEnforceableError: The schema has no grammar.
        """
        root = self.value_rule(self._root, "#")
        while self._waiting:
            reference = self._inside = self._waiting.pop()
            body = self.value_rule(self.resolve(reference), reference, direct=True)
            self.rules.define(self._rule_of_reference[reference], body)
        self._check_circular_references()
        return self.rules.text(root)

    def value_rule(self, schema: Schema, path: str, direct: bool = False) -> str:
        """Return the rule, or alternatives of rules, for the values that `schema` allows.

        Args:
            schema: A part of the root schema.
            path: The place of the part, for errors.
            direct: True if the part is itself the target of a reference, without a keyword around
                it.

        Raises:
            UnsatisfiableSchemaError: No value is valid.
            NotEnforceableError: A grammar cannot express the schema, and the compiler is strict.
        """
        try:
            return self._value_rule(schema, path, direct)
        except NotEnforceableError as error:
            if not self.strict and not isinstance(error, UnsatisfiableSchemaError):
                return any_value_rule(self.rules)
            if " at '" in str(error):
                raise
            raise type(error)(f"{error} at '{path}'") from None

    def _value_rule(self, schema: Schema, path: str, direct: bool) -> str:
        spend_steps(10)
        keywords = without_annotations(schema)
        if set(keywords) == {"$ref"}:
            return self._reference_rule(keywords["$ref"], direct)
        for key in ("anyOf", "oneOf", "allOf"):
            if set(keywords) == {key} and (key != "allOf" or len(keywords[key]) == 1):
                if key == "oneOf":
                    self._check_one_of(keywords[key])
                return self._any_of_rule(
                    [(part, f"{path}/{key}/{at}") for at, part in enumerate(keywords[key])], direct
                )
        return self._flat_rule(self._alternatives(keywords), path)

    def _any_of_rule(self, parts: Sequence[tuple[Schema, str]], direct: bool) -> str:
        """Return the alternatives of rules for the values that any of `parts` allows.

        A part that refers to or combines other schemas has alternatives of its own. All other parts
        share one alternative for their scalar values.

        Args:
            parts: Parts of the root schema, each with its place for errors.
            direct: True if the schema of `parts` is itself the target of a reference, without a
                keyword around it.

        Raises:
            UnsatisfiableSchemaError: No part allows a value.
            NotEnforceableError: A grammar cannot express a part.
        """
        rules: list[str] = []
        flats: list[FlatSchema] = []
        problem = UnsatisfiableSchemaError("nothing is allowed")
        for part, path in parts:
            try:
                if without_annotations(part).keys() & {*APPLICATOR_KEYWORDS}:
                    rules.append(self.value_rule(part, path, direct))
                else:
                    flats += self._alternatives(part)
            except UnsatisfiableSchemaError as error:
                problem = error
        if flats:
            try:
                rules.append(self._flat_rule(flats, parts[0][1]))
            except UnsatisfiableSchemaError as error:
                problem = error
        if not rules:
            raise problem
        spend_steps(sum(map(len, rules)) // 64)
        return " | ".join(dict.fromkeys(choice for rule in rules for choice in rule.split(" | ")))

    def _flat_rule(self, flats: Sequence[FlatSchema], path: str) -> str:
        scalars: list[RegularLanguage] = []
        rules: list[str] = []
        problem = UnsatisfiableSchemaError("nothing is allowed")
        for flat in flats:
            try:
                unenforced = next((key for key in UNENFORCED_KEYWORDS if key in flat), None)
                if unenforced:
                    self.refuse(f"'{unenforced}'")
                self._add_types(flat, path, scalars, rules)
            except UnsatisfiableSchemaError as error:
                problem = error
        if scalars:
            try:
                rules.append(self.rules.language(any_of(scalars)))
            except UnsatisfiableSchemaError as error:
                problem = error
        if not rules:
            raise problem
        return " | ".join(dict.fromkeys(rules))

    def _add_types(self, flat: FlatSchema, path: str, scalars: list[RegularLanguage], rules: list[str]) -> None:
        """Add the types that `flat` allows to `scalars` and `rules`.

        `scalars` receives the languages of scalar types, and `rules` the rules of the other types.
        """
        if "enum" in flat:
            scalars.append(self._enum_language(flat))
            return
        types = allowed_types(flat) or {
            kind for kind, keys in _TYPES_BY_KEYWORD.items() if any(key in flat for key in keys)
        }
        if not types:
            rules.append(any_value_rule(self.rules))
            return
        for kind in _TYPES:
            if kind not in types or (kind == "integer" and "number" in types):
                continue
            if kind in _SCALARS:
                scalars += map(literal, _SCALARS[kind])
            elif kind in ("integer", "number"):
                scalars.append(self._number_language(flat, kind))
            elif kind == "string":
                self._add_string(flat, scalars, rules)
            else:
                rules.append((array_rule if kind == "array" else object_rule)(self, flat, path))

    def _number_language(self, flat: FlatSchema, kind: str) -> RegularLanguage:
        make = integer_language if kind == "integer" else number_language
        try:
            return make(number_range(flat), _decimal(flat, "multipleOf"))
        except UnsatisfiableSchemaError:
            raise
        except NotEnforceableError as error:
            self.refuse(str(error))
            return make(number_range(flat), None)

    def _add_string(self, flat: FlatSchema, scalars: list[RegularLanguage], rules: list[str]) -> None:
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
        has_length = least or most is not None
        rules.append(
            string_rules.bounded_string(self.rules, least, most) if has_length else string_rules.any_string(self.rules)
        )

    def _enum_language(self, flat: FlatSchema) -> RegularLanguage:
        values = [value for value in flat["enum"] if self._is_allowed(value, flat)]
        if not values:
            raise UnsatisfiableSchemaError("no value of 'enum' satisfies the rest of the schema; change one of them")
        return any_word(string_rules.json_literal(value) for value in values)

    def _is_allowed(self, value: Any, flat: FlatSchema) -> bool:
        """Return True if a value of `enum` is valid by the schema's other keywords."""
        types, kind = allowed_types(flat), json_type(value)
        if types is not None and kind not in types and not (kind == "integer" and "number" in types):
            return False
        if kind in ("integer", "number"):
            spend_steps(10)
            step, exact = _decimal(flat, "multipleOf"), Decimal(json.dumps(value))
            return number_range(flat).within(exact) and (step is None or Fraction(exact) % Fraction(step) == 0)
        if kind == "string":
            has_length: bool = flat.get("minLength", 0) <= len(value) <= flat.get("maxLength", len(value))
            if "pattern" in flat:
                self.refuse("'pattern' of an 'enum' or 'const'")
            return has_length
        if kind in ("array", "object") and any(key in flat for key in _TYPES_BY_KEYWORD[kind]):
            self.refuse(f"'enum' with {kind}s and other keywords for {kind}s")
        return True

    def refuse(self, what: str) -> None:
        """Raise NotEnforceableError if the compiler is strict.

        `what` names the keyword for the message.
        """
        if self.strict:
            raise NotEnforceableError(f"{what} cannot be enforced; leave it out")

    def _check_one_of(self, parts: Sequence[Schema]) -> None:
        if self.strict and may_overlap(parts, self._alternatives):
            self.refuse("'oneOf' whose parts may be valid at the same time")

    def _reference_rule(self, reference: str, direct: bool) -> str:
        if reference not in self._rule_of_reference:
            self._rule_of_reference[reference] = self.rules.reserve()
            self._waiting.append(reference)
        if direct and self._inside is not None:
            self._direct.setdefault(self._inside, set()).add(reference)
        return self._rule_of_reference[reference]

    def resolve(self, reference: str) -> Schema:
        """Return the target of a reference. `validate_schema` has checked that the target exists."""
        if reference not in self._resolved:
            self._resolved[reference] = resolve_pointer(self._root, reference)
        return self._resolved[reference]

    def _check_circular_references(self) -> None:
        """Raise NotEnforceableError for a reference that leads directly back to itself.

        A reference does so if no keyword stands between the references on the way.
        """
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
    """Return the range of numbers that a flat schema allows.

    The range has the tighter of each bound and its exclusive form.
    """
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
        raise NotEnforceableError(f"'{key}' must be a number, not {json.dumps(value)}")
    if key == "multipleOf" and value <= 0:
        raise NotEnforceableError("'multipleOf' must be more than 0")
    text = json.dumps(value)
    if len(text) > _MAX_NUMBER_LENGTH:
        raise NotEnforceableError(f"'{key}' has more than {_MAX_NUMBER_LENGTH} digits")
    return Decimal(text)
