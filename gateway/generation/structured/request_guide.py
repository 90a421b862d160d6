"""The guide of a request, which the engine's output follows.

The guide is made from `response_format` and the `guided_*` fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.generation.structured.grammar import (
    NotEnforceableError,
    choice_grammar,
    json_schema_grammar,
    regex_grammar,
)
from llmops.gateway.generation.structured.grammar.client_grammar import find_ambiguity, find_ebnf_error, isolate_classes
from llmops.gateway.generation.structured.grammar.compile_limits import MAX_STEPS, GrammarTooComplexError, step_budget
from llmops.gateway.generation.structured.schema_validation import (
    DEFAULT_LIMITS,
    SchemaLimits,
    pattern_problem,
    validate_schema,
)
from llmops.gateway.interfaces import Guide
from llmops.gateway.schemas.request_fields import ResponseFormat, SamplingFields

#: Guide for any JSON object. The engines' guide type `json` also allows other JSON values, such as
#: a bare string.
JSON_OBJECT = Guide("json_schema", '{"type":"object"}')

#: Maximum length of a schema that is sent as text, as a multiple of the limit for compact JSON,
#: because the text may be indented.
_WHITESPACE_FACTOR = 8


def parse_guide(request: SamplingFields, limits: SchemaLimits = DEFAULT_LIMITS) -> Guide | None:
    """Return the guide that `request` asks for, or None.

    Raises:
        InvalidRequestError: A field is wrong, or more than one field asks for a guide.
    """
    fields = [field for field in _guide_fields(request) if _asks_for_guide(field, request)]
    if len(fields) > 1:
        raise InvalidRequestError(
            f"Only one of {', '.join(fields)} can be given; leave the others out.", param=fields[1]
        )
    return _GUIDE_FACTORIES[fields[0]](getattr(request, fields[0]), fields[0], limits) if fields else None


def guide_field(request: SamplingFields) -> str:
    """Return the field from which `parse_guide` takes the guide, for errors."""
    return next((field for field in _guide_fields(request) if _asks_for_guide(field, request)), "response_format")


def requires_strict_guide(request: SamplingFields) -> bool:
    """Return True unless the request uses a `response_format` that is not `strict`.

    Without `strict`, keywords that cannot be enforced may be ignored.
    """
    form = request.response_format
    if guide_field(request) != "response_format" or form is None or form.json_schema is None:
        return True
    return form.json_schema.strict is True


def compile_guide(guide: Guide, kinds: Sequence[str], strict: bool, param: str) -> Guide:
    """Return `guide` as a grammar, if the engine takes grammars.

    Args:
        guide: The guide.
        kinds: The kinds of guides that the engine takes.
        strict: True to refuse keywords that cannot be enforced, instead of ignoring them.
        param: The request's field, for errors.

    Raises:
        InvalidRequestError: A part cannot be enforced. The message names the keyword and its place.
    """
    if "ebnf_grammar" not in kinds or guide.kind not in ("json_schema", "regex"):
        return guide
    try:
        grammar = regex_grammar(guide.text) if guide.kind == "regex" else json_schema_grammar(guide.text, strict)
    except NotEnforceableError as error:
        raise _unusable(param, error) from None
    return Guide("ebnf_grammar", grammar)


def _unusable(param: str, reason: object) -> InvalidRequestError:
    return InvalidRequestError(f"'{param}' cannot be used: {reason}.", param=param)


def _asks_for_guide(field: str, request: SamplingFields) -> bool:
    """Return True unless `field` is a `response_format` that is missing or of type `text`."""
    form = request.response_format
    return field != "response_format" or (form is not None and form.type != "text")


def _guide_fields(request: SamplingFields) -> list[str]:
    """Return the fields that have a value and may ask for a guide."""
    return [field for field in _GUIDE_FACTORIES if getattr(request, field) is not None]


def _from_format(value: ResponseFormat, param: str, limits: SchemaLimits) -> Guide:
    if value.type == "json_object":
        return JSON_OBJECT
    if value.json_schema is None or value.json_schema.schema_ is None:
        raise InvalidRequestError(
            "A response_format of type json_schema needs 'json_schema.schema'; put the schema there.",
            param=f"{param}.json_schema.schema",
        )
    return Guide("json_schema", validate_schema(value.json_schema.schema_, f"{param}.json_schema.schema", limits))


def _from_json(value: str | dict[str, Any], param: str, limits: SchemaLimits) -> Guide:
    if isinstance(value, str):
        most = _WHITESPACE_FACTOR * limits.size
        if len(value) > most:
            raise InvalidRequestError(f"'{param}' has more than {most} characters; shorten it.", param=param)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidRequestError(f"'{param}' is not valid JSON; correct it.", param=param) from None
    return Guide("json_schema", validate_schema(value, param, limits))


def _from_regex(value: str, param: str, limits: SchemaLimits) -> Guide:
    problem = pattern_problem(value, limits)
    if problem:
        raise _unusable(param, problem)
    return Guide("regex", value)


def _from_choice(value: list[str], param: str, limits: SchemaLimits) -> Guide:
    if not isinstance(value, list) or not all(isinstance(choice, str) and choice for choice in value):
        raise InvalidRequestError(f"'{param}' must be a list of non-empty strings.", param=param)
    if not 0 < len(value) <= limits.choices or sum(map(len, value)) > limits.size:
        raise InvalidRequestError(
            f"'{param}' must have 1 to {limits.choices} choices and {limits.size} characters together at most.",
            param=param,
        )
    try:
        return Guide("ebnf_grammar", choice_grammar(tuple(value)))
    except NotEnforceableError as error:
        raise _unusable(param, error) from None


def _from_grammar(value: str, param: str, limits: SchemaLimits) -> Guide:
    if not isinstance(value, str) or not value.strip() or len(value) > limits.size:
        raise InvalidRequestError(f"'{param}' must be an EBNF grammar of 1 to {limits.size} characters.", param=param)
    try:
        with step_budget(MAX_STEPS):
            problem = find_ebnf_error(value) or find_ambiguity(value)
            isolated = value if problem else isolate_classes(value)
            if isolated != value:
                # Count again, because `isolate_classes` has turned classes into rules.
                problem = find_ebnf_error(isolated)
    except GrammarTooComplexError as error:
        problem = str(error)
    if problem:
        raise InvalidRequestError(f"'{param}' cannot be used as an EBNF grammar: {problem}.", param=param)
    return Guide("ebnf_grammar", isolated)


def _from_json_object(value: object, param: str, limits: SchemaLimits) -> Guide | None:
    return JSON_OBJECT if value else None


def _from_structured_outputs(value: dict[str, Any], param: str, limits: SchemaLimits) -> Guide | None:
    fields = [key for key, part in value.items() if part is not None]
    unknown = next((key for key in fields if key not in _STRUCTURED_OUTPUTS), None)
    if unknown or len(fields) != 1:
        which = f"{param}.{unknown}" if unknown else param
        raise InvalidRequestError(f"'{param}' takes exactly one of {', '.join(_STRUCTURED_OUTPUTS)}.", param=which)
    return _STRUCTURED_OUTPUTS[fields[0]](value[fields[0]], f"{param}.{fields[0]}", limits)


_GuideFactory = Callable[[Any, str, SchemaLimits], Guide | None]

#: Functions that make a guide, by the member of `structured_outputs` that they read.
_STRUCTURED_OUTPUTS: dict[str, _GuideFactory] = {
    "json": _from_json,
    "regex": _from_regex,
    "choice": _from_choice,
    "grammar": _from_grammar,
    "json_object": _from_json_object,
}

#: Functions that make a guide, by the field of a request that they read.
_GUIDE_FACTORIES: dict[str, _GuideFactory] = {
    "response_format": _from_format,
    "guided_json": _from_json,
    "guided_regex": _from_regex,
    "guided_choice": _from_choice,
    "guided_grammar": _from_grammar,
    "structured_outputs": _from_structured_outputs,
}
#: Fields that may ask for a guide; a request without them has none.
GUIDE_FIELDS = frozenset(_GUIDE_FACTORIES)
