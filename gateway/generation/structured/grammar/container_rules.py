"""Objects and arrays. Properties come in the order in which the schema declares them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Set
from typing import Any, Protocol

from llmops.gateway.generation.structured.grammar.errors import UnsatisfiableSchemaError
from llmops.gateway.generation.structured.grammar.grammar_builder import SPACE, GrammarBuilder, terminal
from llmops.gateway.generation.structured.grammar.number_rules import NumberRange, number
from llmops.gateway.generation.structured.grammar.regex_parser import regex_language
from llmops.gateway.generation.structured.grammar.schema_merge import FlatSchema, Schema
from llmops.gateway.generation.structured.grammar.string_rules import (
    any_string,
    json_character,
    json_literal,
    other_property_name,
    quoted,
)
from llmops.gateway.generation.structured.grammar.work_budget import spend_steps

# that are looked at in a list
_NAMES_PER_STEP = 32
_COMMA, _COLON = f'"," {SPACE}', f'":" {SPACE}'


class ContainerCompiler(Protocol):
    """Compiles what is inside a container: `schema.Compiler`."""

    rules: GrammarBuilder

    def value(self, schema: Schema, path: str, direct: bool = False) -> str: ...

    def finds(self, pattern: str, text: str, keyword: str) -> bool: ...

    def refuse(self, what: str) -> None: ...


def anything(rules: GrammarBuilder) -> str:
    """Any JSON value."""
    name, members, items = "any_value", "any_members", "any_items"
    text = any_string(rules)
    scalar = rules.language(number(NumberRange()))
    rules.define(members, f'"" | {_COMMA} {text} {_COLON} {name} {members}')
    rules.define(items, f'"" | {_COMMA} {name} {items}')
    whole = rules.add(f'"{{" {SPACE} {rules.add(f"""{text} {_COLON} {name} {members} {SPACE} "}}" | "}}" """.strip())}')
    listed = rules.add(f'"[" {SPACE} {rules.add(f"""{name} {items} {SPACE} "]" | "]" """.strip())}')
    rules.define(name, f'{scalar} | {text} | "true" | "false" | "null" | {whole} | {listed}')
    return name


def array_rule(compiler: ContainerCompiler, flat: FlatSchema, path: str) -> str:
    """A rule for arrays."""
    first, rest = _items_of(flat)
    least, most = flat.get("minItems", 0), flat.get("maxItems")
    if flat.get("uniqueItems") and (most is None or most > 1):
        compiler.refuse("'uniqueItems'")
    rules = compiler.rules
    names = [rules.add(compiler.value(part, f"{path}/prefixItems/{at}")) for at, part in enumerate(first)]
    item = None
    if rest is not False and (most is None or most > len(names)):
        item = _if_possible(lambda: rules.add(compiler.value(rest, f"{path}/items")))
    names = names[:most]
    if (least > len(names) and item is None) or (most is not None and least > most):
        raise UnsatisfiableSchemaError(f"an array cannot have the {least} items of 'minItems'")
    tail = ""
    if item is not None:
        more = max(least - max(len(names), 1), 0)
        tail = _repeated(rules, f"{_COMMA} {item}", more, None if most is None else most - max(len(names), 1))
    return rules.add(f'"[" {SPACE} {_array_elements(rules, names, item, tail, least)}')


def _items_of(flat: Mapping[str, Any]) -> tuple[list[Schema], Schema]:
    """The schemas of the first items and of all others. Draft 7 has a list in `items`."""
    if isinstance(flat.get("items"), list):
        return flat["items"], flat.get("additionalItems", False)
    first = flat.get("prefixItems", [])
    enough = not first or flat.get("minItems", 0) > len(first)
    return first, flat.get("items", enough)


def _array_elements(rules: GrammarBuilder, names: list[str], item: str | None, tail: str, least: int) -> str:
    """What comes after `[`: items that may end after any from `least` on."""
    end = f'{SPACE} "]"'
    rest = rules.add(f"{tail} {end}".strip())
    if not names:
        some = f"{item} {rest}" if item is not None else ""
        return rules.add(" | ".join(choice for choice in (some, '"]"' if least == 0 else "") if choice))
    for at in range(len(names) - 1, 0, -1):
        following = f"{_COMMA} {names[at]} {rest}"
        rest = rules.add(f"{following} | {end}" if at >= least else following)
    some = f"{names[0]} {rest}"
    return rules.add(some if least else f'{some} | "]"')


def _repeated(rules: GrammarBuilder, item: str, least: int, most: int | None) -> str:
    """`item` repeated within bounds; optional repeats are nested so that each follows the one before."""
    if most is None:
        name = rules.reserve()
        rules.define(name, f'"" | {item} {name}')
        return " ".join([*[item] * least, name])
    rest = ""
    for _ in range(most - least):
        rest = rules.add(f'"" | {item} {rest}'.strip())
    return " ".join(part for part in [*[item] * least, rest] if part)


def object_rule(compiler: ContainerCompiler, flat: FlatSchema, path: str) -> str:
    """A rule for objects."""
    properties, required = _properties_of(compiler, flat), frozenset(flat.get("required", ()))
    kept = _allowed_properties(flat, properties, required)
    members = []
    for name in kept:
        value = _member(compiler, properties[name], f"{path}/properties/{name}", name in required)
        if value is not None:
            members.append((json_literal(name), value, name in required))
    extra, most = _extra(compiler, flat, path, properties), flat.get("maxProperties")
    least = max(flat.get("minProperties", 0) - len(required), 0)
    if least > 1:
        compiler.refuse("'minProperties' of more than the required ones and one")
    body = _ObjectMembers(compiler.rules, members, extra, None if most is None else most - len(members), bool(least))
    return compiler.rules.add(f'"{{" {SPACE} {body.first()}')


def _properties_of(compiler: ContainerCompiler, flat: FlatSchema) -> dict[str, Schema]:
    """Declared and required properties, each combined with the patterns that its name matches."""
    spend_steps(len(flat.get("properties", ())) + len(flat.get("required", ())))
    rest = flat.get("additionalProperties", flat.get("unevaluatedProperties", True))
    properties = dict(flat.get("properties", {}))
    patterns = flat.get("patternProperties", {})
    for name in flat.get("required", ()):
        if name not in properties:
            matched = any(compiler.finds(pattern, name, "patternProperties") for pattern in patterns)
            properties[name] = True if matched else rest
    for name, pattern in itertools.product(list(properties), patterns):
        if compiler.finds(pattern, name, "patternProperties"):
            properties[name] = {"allOf": [properties[name], patterns[pattern]]}
    names = flat.get("propertyNames", True)
    if names is False:
        return {}
    if names is not True and properties:
        properties = {name: schema for name, schema in properties.items() if _name_allowed(compiler, names, name)}
    return properties


def _name_allowed(compiler: ContainerCompiler, names: Schema, name: str) -> bool:
    if not isinstance(names, Mapping) or set(names) - {"type", "pattern", "minLength", "maxLength", "enum"}:
        compiler.refuse("'propertyNames' beside 'properties'")
        return True
    spend_steps(1 + len(names.get("enum", ())) // _NAMES_PER_STEP)
    fits = names.get("minLength", 0) <= len(name) <= names.get("maxLength", len(name))
    fits = fits and ("pattern" not in names or compiler.finds(names["pattern"], name, "propertyNames"))
    return fits and ("enum" not in names or name in names["enum"])


def _allowed_properties(flat: FlatSchema, properties: Mapping[str, Schema], required: Set[str]) -> list[str]:
    """The properties that may occur; of the optional ones, as many as 'maxProperties' leaves room for."""
    most = flat.get("maxProperties")
    if not required <= properties.keys() or (most is not None and most < len(required)):
        raise UnsatisfiableSchemaError("the required properties are not allowed")
    room = None if most is None else most - len(required)
    optional = [name for name in properties if name not in required]
    left_out = frozenset() if room is None else frozenset(optional[room:])
    return [name for name in properties if name not in left_out]


def _member(compiler: ContainerCompiler, schema: Schema, path: str, needed: bool) -> str | None:
    if needed:
        return compiler.rules.add(compiler.value(schema, path))
    return _if_possible(lambda: compiler.rules.add(compiler.value(schema, path)))


def _if_possible(make: Callable[[], str]) -> str | None:
    try:
        return make()
    except UnsatisfiableSchemaError:
        return None


def _extra(compiler: ContainerCompiler, flat: FlatSchema, path: str, properties: Mapping[str, Schema]) -> str | None:
    """A member with an undeclared name. None where the schema forbids them or does not mention them: then only declared
    ones are written, as OpenAI does."""
    rules, patterns, names = compiler.rules, flat.get("patternProperties", {}), flat.get("propertyNames", True)
    # a function without arguments is declared with no properties; an object that may be anything has no such keyword
    anything = not properties and ("properties" not in flat or bool(flat.get("minProperties")))
    rest: Any = flat.get("additionalProperties", flat.get("unevaluatedProperties", anything))
    if names is False:
        return None
    if names is not True and not properties and not patterns and rest is not False:
        key = rules.add(compiler.value({"type": "string", **names}, f"{path}/propertyNames"))
        value = rules.add(compiler.value(rest, f"{path}/additionalProperties"))
        return f"{key} {_COLON} {value}"
    if patterns:
        return None if properties else _pattern_members(compiler, patterns, path)
    if rest is False or names is not True:
        return None
    key = other_property_name(rules, list(properties)) if properties else any_string(rules)
    made = _if_possible(lambda: rules.add(compiler.value(rest, f"{path}/additionalProperties")))
    return None if made is None else f"{key} {_COLON} {made}"


def _pattern_members(compiler: ContainerCompiler, patterns: Mapping[str, Schema], path: str) -> str:
    """Names that match the first pattern; with more patterns the value must be valid under each, as both may match."""
    first = next(iter(patterns))
    key = compiler.rules.language(quoted(regex_language(first, json_character)))
    value = {"allOf": list(patterns.values())} if len(patterns) > 1 else patterns[first]
    return f"{key} {_COLON} {compiler.rules.add(compiler.value(value, f'{path}/patternProperties'))}"


class _ObjectMembers:
    """What comes after `{`, and after each member. Optional members may be left out, but not moved."""

    def __init__(
        self,
        rules: GrammarBuilder,
        members: list[tuple[str, str, bool]],
        extra: str | None,
        most: int | None,
        some: bool,
    ) -> None:
        self._rules, self._members, self._extra, self._some = rules, members, extra, some
        self._last: int = max((at for at, member in enumerate(members) if member[2]), default=-1)
        self._more = (
            "" if extra is None else _repeated(rules, f"{_COMMA} {extra}", 0, None if most is None else max(most, 0))
        )
        self._first_more = ""
        if extra is not None and (most is None or most > 0):
            self._first_more = f"{extra} " + _repeated(
                rules, f"{_COMMA} {extra}", 0, None if most is None else most - 1
            )
        self._after = self._tails()

    def _member(self, at: int) -> str:
        name, value, _ = self._members[at]
        return f"{terminal(name + ':')} {SPACE} {value} {self._after[at + 1]}"

    def _tails(self) -> list[str]:
        """For each number of members that have been decided, when at least one was written: what may follow."""
        end = f'{SPACE} "}}"'
        self._after = [""] * len(self._members) + [self._rules.add(f"{self._more} {end}".strip())]
        keys = ""
        for at in range(len(self._members) - 1, 0, -1):
            own = self._member(at)
            keys = self._rules.add(f"{own} | {keys}" if keys and not self._members[at][2] else own)
            after = f"{_COMMA} {keys}"
            if at > self._last:
                # `more` and the members both begin with a comma: extra members only follow when no declared one does
                after = f"{after} | {self._after[-1]}"
            self._after[at] = self._rules.add(after)
        return self._after

    def first(self) -> str:
        """Nothing is written yet."""
        choices = [f'{self._first_more} {SPACE} "}}"'] if self._first_more else []
        if not self._some:
            choices.append('"}"')
        rest = self._rules.add(" | ".join(choices)) if choices else None
        for at in range(len(self._members) - 1, -1, -1):
            skipped = [] if rest is None or self._members[at][2] else [rest]
            rest = self._rules.add(" | ".join([self._member(at), *skipped]))
        if rest is None:
            raise UnsatisfiableSchemaError("an object cannot have the properties of 'minProperties'")
        return rest
