"""Rules for objects and arrays.

Properties are generated in the order in which the schema declares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from llmops.gateway.generation.structured.grammar.compile_limits import UnsatisfiableSchemaError, spend_steps
from llmops.gateway.generation.structured.grammar.grammar_builder import SPACE, GrammarBuilder, terminal
from llmops.gateway.generation.structured.grammar.number_rules import NumberRange, number_language
from llmops.gateway.generation.structured.grammar.schema_merge import FlatSchema, Schema
from llmops.gateway.generation.structured.grammar.string_rules import (
    any_string,
    json_literal,
    other_property_name,
)

#: Property names compared in one step of work.
_NAMES_PER_STEP = 32

_COMMA, _COLON = f'"," {SPACE}', f'":" {SPACE}'
_END_OBJECT, _END_ARRAY = f'{SPACE} "}}"', f'{SPACE} "]"'


class ContainerCompiler(Protocol):
    """The methods of `SchemaCompiler` that the rules of containers call."""

    rules: GrammarBuilder

    def value_rule(self, schema: Schema, path: str, direct: bool = False) -> str: ...

    def refuse(self, what: str) -> None: ...


def any_value_rule(rules: GrammarBuilder) -> str:
    """Return the name of the rule for any JSON value."""
    name, members, items = "any_value", "any_members", "any_items"
    text = any_string(rules)
    scalar = rules.language(number_language(NumberRange()))
    rules.define(members, f'"" | {_COMMA} {text} {_COLON} {name} {members}')
    rules.define(items, f'"" | {_COMMA} {name} {items}')
    whole = rules.add(
        f'"{{" {SPACE} {rules.add(f"""{text} {_COLON} {name} {members} {_END_OBJECT} | "}}" """.strip())}'
    )
    listed = rules.add(f'"[" {SPACE} {rules.add(f"""{name} {items} {_END_ARRAY} | "]" """.strip())}')
    rules.define(name, f'{scalar} | {text} | "true" | "false" | "null" | {whole} | {listed}')
    return name


# -- arrays


def array_rule(compiler: ContainerCompiler, flat: FlatSchema, path: str) -> str:
    """Return the rule for the arrays that `flat` allows.

    Raises:
        UnsatisfiableSchemaError: No array is allowed.
    """
    first, rest = _item_schemas(flat)
    least, most = flat.get("minItems", 0), flat.get("maxItems")
    if flat.get("uniqueItems") and (most is None or most > 1):
        compiler.refuse("'uniqueItems'")
    rules = compiler.rules
    names = [rules.add(compiler.value_rule(part, f"{path}/prefixItems/{at}")) for at, part in enumerate(first)]
    item = None
    if rest is not False and (most is None or most > len(names)):
        item = _if_satisfiable(lambda: rules.add(compiler.value_rule(rest, f"{path}/items")))
    names = names[:most]
    if (least > len(names) and item is None) or (most is not None and least > most):
        raise UnsatisfiableSchemaError(f"'minItems' is {least}, and the schema allows fewer items; lower it")
    tail = ""
    if item is not None:
        before = max(len(names), 1)
        tail = _repeated(rules, f"{_COMMA} {item}", max(least - before, 0), None if most is None else most - before)
    return rules.add(f'"[" {SPACE} {_array_elements(rules, names, item, tail, least)}')


def _item_schemas(flat: Mapping[str, Any]) -> tuple[list[Schema], Schema]:
    """Return the schemas of the first items, and the schema of all other items.

    Draft 7 has the schemas of the first items in `items`.
    """
    if isinstance(flat.get("items"), list):
        return flat["items"], flat.get("additionalItems", False)
    first = flat.get("prefixItems", [])
    others_needed = not first or flat.get("minItems", 0) > len(first)
    return first, flat.get("items", others_needed)


def _array_elements(rules: GrammarBuilder, names: list[str], item: str | None, tail: str, least: int) -> str:
    """Return the rule for the text of an array after `[`.

    Args:
        rules: The grammar.
        names: The names of the rules of the first items.
        item: The name of the rule of all further items; None to allow no further items.
        tail: The rule text for the items after the first items, or after the first further item if
            `names` is empty.
        least: The number of items after which the array may end.
    """
    rest = rules.add(f"{tail} {_END_ARRAY}".strip())
    if not names:
        some = f"{item} {rest}" if item is not None else ""
        return rules.add(" | ".join(choice for choice in (some, '"]"' if least == 0 else "") if choice))
    for at in range(len(names) - 1, 0, -1):
        following = f"{_COMMA} {names[at]} {rest}"
        rest = rules.add(f"{following} | {_END_ARRAY}" if at >= least else following)
    some = f"{names[0]} {rest}"
    return rules.add(some if least else f'{some} | "]"')


def _repeated(rules: GrammarBuilder, item: str, least: int, most: int | None) -> str:
    """Return the rule text for `least` to `most` repetitions of `item`.

    `most` is None for any number of repetitions from `least` on. Optional repetitions are nested,
    so that each repetition requires the previous one.
    """
    if most is None:
        rest = rules.reserve()
        rules.define(rest, f'"" | {item} {rest}')
    else:
        rest = ""
        for _ in range(most - least):
            rest = rules.add(f'"" | {item} {rest}'.strip())
    return " ".join(part for part in [*[item] * least, rest] if part)


# -- objects


class _Member(NamedTuple):
    """A declared property.

    Attributes:
        name: The name as JSON.
        value: The name of the rule of the value.
        required: True if every object has the property.
    """

    name: str
    value: str
    required: bool


def object_rule(compiler: ContainerCompiler, flat: FlatSchema, path: str) -> str:
    """Return the rule for the objects that `flat` allows.

    Raises:
        UnsatisfiableSchemaError: No object is allowed.
    """
    rules, required = compiler.rules, frozenset(flat.get("required", ()))
    properties = _property_schemas(compiler, flat)
    if not required <= properties.keys():
        raise UnsatisfiableSchemaError("the schema does not allow all properties of 'required'; allow them")
    members = []
    for name in properties:

        def value_rule(name: str = name) -> str:
            return rules.add(compiler.value_rule(properties[name], f"{path}/properties/{name}"))

        value = value_rule() if name in required else _if_satisfiable(value_rule)
        if value is not None:
            members.append(_Member(json_literal(name), value, name in required))
    additional = _additional_member(compiler, flat, path, properties)
    return rules.add(f'"{{" {SPACE} {_object_members(rules, members, additional)}')


def _property_schemas(compiler: ContainerCompiler, flat: FlatSchema) -> dict[str, Schema]:
    """Return the schemas of the declared and required properties."""
    spend_steps(len(flat.get("properties", ())) + len(flat.get("required", ())))
    rest = flat.get("additionalProperties", flat.get("unevaluatedProperties", True))
    properties = dict(flat.get("properties", {}))
    for name in flat.get("required", ()):
        properties.setdefault(name, rest)
    names = flat.get("propertyNames", True)
    if names is False:
        return {}
    if names is not True and properties:
        properties = {name: schema for name, schema in properties.items() if _is_name_allowed(compiler, names, name)}
    return properties


def _is_name_allowed(compiler: ContainerCompiler, names: Schema, name: str) -> bool:
    if not isinstance(names, Mapping) or set(names) - {"type", "minLength", "maxLength", "enum"}:
        compiler.refuse("'propertyNames' beside 'properties'")
        return True
    spend_steps(1 + len(names.get("enum", ())) // _NAMES_PER_STEP)
    has_length = names.get("minLength", 0) <= len(name) <= names.get("maxLength", len(name))
    return has_length and ("enum" not in names or name in names["enum"])


def _if_satisfiable(make: Callable[[], str]) -> str | None:
    try:
        return make()
    except UnsatisfiableSchemaError:
        return None


def _additional_member(
    compiler: ContainerCompiler, flat: FlatSchema, path: str, properties: Mapping[str, Schema]
) -> str | None:
    """Return the rules for a member with an undeclared name; None if such members are not allowed.

    If the schema declares properties and does not mention others, only declared properties are
    generated, as at OpenAI.
    """
    rules, names = compiler.rules, flat.get("propertyNames", True)
    # A function without arguments declares `properties` without a property; an object of any form
    # lacks the keyword.
    is_open = not properties and "properties" not in flat
    rest: Any = flat.get("additionalProperties", flat.get("unevaluatedProperties", is_open))
    if names is False:
        return None
    if names is not True and not properties and rest is not False:
        key = rules.add(compiler.value_rule({"type": "string", **names}, f"{path}/propertyNames"))
        value = rules.add(compiler.value_rule(rest, f"{path}/additionalProperties"))
        return f"{key} {_COLON} {value}"
    if rest is False or names is not True:
        return None
    key = other_property_name(rules, list(properties)) if properties else any_string(rules)
    made = _if_satisfiable(lambda: rules.add(compiler.value_rule(rest, f"{path}/additionalProperties")))
    return None if made is None else f"{key} {_COLON} {made}"


def _object_members(rules: GrammarBuilder, members: list[_Member], additional: str | None) -> str:
    """Return the rule for the text after `{`. Optional members may be absent, but not reordered.

    Args:
        rules: The grammar.
        members: The declared members.
        additional: The rules for a member with an undeclared name; None to allow no such member.
    """
    more = _repeated(rules, f"{_COMMA} {additional}", 0, None) if additional is not None else ""
    last_required = max((at for at, member in enumerate(members) if member.required), default=-1)
    # Rule for the text after the first `n` declared members were decided and at least one was
    # written, by `n`.
    after = [""] * len(members) + [rules.add(f"{more} {_END_OBJECT}".strip())]

    def member_rule(at: int) -> str:
        return f"{terminal(members[at].name + ':')} {SPACE} {members[at].value} {after[at + 1]}"

    keys = ""
    for at in range(len(members) - 1, 0, -1):
        own = member_rule(at)
        keys = rules.add(f"{own} | {keys}" if keys and not members[at].required else own)
        following = f"{_COMMA} {keys}"
        if at > last_required:
            # `more` and the members both begin with a comma: additional members follow only when no
            # other declared member follows.
            following = f"{following} | {after[-1]}"
        after[at] = rules.add(following)
    rest = rules.add(f'{additional} {more} {_END_OBJECT} | "}}"' if additional is not None else '"}"')
    for at in range(len(members) - 1, -1, -1):
        skipped = [] if members[at].required else [rest]
        rest = rules.add(" | ".join([member_rule(at), *skipped]))
    return rest
