"""A JSON Schema as a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from llmops.gateway.answers.grammar import containers, strings
from llmops.gateway.answers.grammar.errors import NotEnforceableError, NothingError
from llmops.gateway.answers.grammar.language import Language, any_of, literal, words
from llmops.gateway.answers.grammar.merge import UNENFORCED, Flat, Schema, Ways, own, type_of, types_of
from llmops.gateway.answers.grammar.numbers import Bounds, integer, number
from llmops.gateway.answers.grammar.overlap import overlap
from llmops.gateway.answers.grammar.patterns import finds
from llmops.gateway.answers.grammar.references import pointed_at
from llmops.gateway.answers.grammar.rules import Rules
from llmops.gateway.answers.grammar.work import spend

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# what a schema without a type speaks of is what it is meant for
_HINTS = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
# more than any double has
_LONGEST_NUMBER = 400
_SCALARS = {"null": ["null"], "boolean": ["true", "false"]}


class Compiler:
    """Writes the rules of one schema. `strict`: what cannot be enforced is an error, else it is left out."""

    def __init__(self, root: Schema, strict: bool) -> None:
        self.rules = Rules()
        self.strict = strict
        self._root = root
        self._references: dict[str, str] = {}
        self._resolved: dict[str, Schema] = {}
        self._ways = Ways(self.resolve, self._exclusive)
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
        self._refuse_circles()
        return self.rules.text(root)

    def value(self, schema: Schema, path: str, direct: bool = False) -> str:
        """A rule, or several to choose from. `direct`: of a reference itself, with nothing around it."""
        try:
            return self._value(schema, path, direct)
        except NotEnforceableError as error:
            if not self.strict and not isinstance(error, NothingError):
                return containers.anything(self.rules)
            if " at '" in str(error):
                raise
            raise type(error)(f"{error} at '{path}'") from None

    def _value(self, schema: Schema, path: str, direct: bool) -> str:
        spend(10)
        given = own(schema)
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
                if own(part).keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
                    apart.append(self.value(part, path, direct))
                else:
                    flats += self._ways(part)
            except NothingError as error:
                problem = error
        if flats:
            try:
                apart.append(self._flat(flats, parts[0][1]))
            except NothingError as error:
                problem = error
        if not apart:
            raise problem or NothingError("nothing is allowed")
        spend(sum(map(len, apart)) // 64)
        return " | ".join(dict.fromkeys(choice for part in apart for choice in part.split(" | ")))

    def _flat(self, flats: Sequence[Flat], path: str) -> str:
        scalars: list[Language] = []
        rules: list[str] = []
        problem: NothingError | None = None
        for flat in flats:
            try:
                self._unenforced(flat, path)
                self._typed(flat, path, scalars, rules)
            except NothingError as error:
                problem = error
        if scalars:
            try:
                rules.append(self.rules.language(any_of(scalars)))
            except NothingError as error:
                problem = error
        if not rules:
            raise problem or NothingError("nothing is allowed")
        return " | ".join(dict.fromkeys(rules))

    def _typed(self, flat: Flat, path: str, scalars: list[Language], rules: list[str]) -> None:
        if "enum" in flat:
            scalars.append(self._enum(flat))
            return
        types = types_of(flat) or {kind for kind, keys in _HINTS.items() if any(key in flat for key in keys)}
        if not types:
            rules.append(containers.anything(self.rules))
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
                make = containers.array_rule if kind == "array" else containers.object_rule
                rules.append(make(self, flat, path))

    def _number(self, flat: Mapping[str, Any], kind: str) -> Language:
        make = integer if kind == "integer" else number
        try:
            return make(bounds_of(flat), _decimal(flat, "multipleOf"))
        except NothingError:
            raise
        except NotEnforceableError as error:
            self.refuse(str(error))
            return make(bounds_of(flat), None)

    def _string(self, flat: Flat, scalars: list[Language], rules: list[str]) -> None:
        least, most = int(flat.get("minLength", 0)), flat.get("maxLength")
        if most is not None and least > most:
            raise NothingError(f"'minLength' {least} is more than 'maxLength' {most}")
        try:
            if "pattern" in flat:
                scalars.append(strings.pattern_string(flat["pattern"], least, most))
                return
            if flat.get("format") in strings.FORMATS and most is None and least < 2:
                scalars.append(strings.format_string(flat["format"], least, most))
                return
        except NotEnforceableError as error:
            self.refuse(f"'pattern': {error}")
        sized = least or most is not None
        rules.append(strings.sized_string(self.rules, least, most) if sized else strings.any_string(self.rules))

    def _enum(self, flat: Flat) -> Language:
        values = [value for value in flat["enum"] if self._allowed(value, flat)]
        if not values:
            raise NothingError("no value of 'enum' satisfies the rest of the schema")
        return words(strings.json_literal(value) for value in values)

    def _allowed(self, value: Any, flat: Flat) -> bool:
        """Whether a listed value meets the rest of its schema."""
        types = types_of(flat)
        kind = type_of(value)
        if types is not None and kind not in types and not (kind == "integer" and "number" in types):
            return False
        if kind in ("integer", "number"):
            spend(10)
            step, exact = _decimal(flat, "multipleOf"), Decimal(json.dumps(value))
            return bounds_of(flat).within(exact) and (step is None or Fraction(exact) % Fraction(step) == 0)
        if kind == "string":
            fits = flat.get("minLength", 0) <= len(value) <= flat.get("maxLength", len(value))
            return fits and ("pattern" not in flat or self.finds(flat["pattern"], value, "pattern"))
        if kind in ("array", "object") and any(key in flat for key in _HINTS[kind]):
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
        found = next((key for key in UNENFORCED if key in flat), None)
        if found:
            self.refuse(f"'{found}'")

    def _exclusive(self, parts: Sequence[Schema]) -> None:
        if self.strict and overlap(parts, self._ways):
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
            self._resolved[reference] = pointed_at(self._root, reference)
        return self._resolved[reference]

    def _refuse_circles(self) -> None:
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


def bounds_of(flat: Mapping[str, Any]) -> Bounds:
    """The tightest of minimum, maximum and their exclusive forms."""
    low, high = _decimal(flat, "minimum"), _decimal(flat, "maximum")
    above, below = _decimal(flat, "exclusiveMinimum"), _decimal(flat, "exclusiveMaximum")
    open_low = above is not None and (low is None or above >= low)
    open_high = below is not None and (high is None or below <= high)
    return Bounds(above if open_low else low, below if open_high else high, open_low, open_high)


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
