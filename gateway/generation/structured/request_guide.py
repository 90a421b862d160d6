"""response_format and the guided_* extras → the guide that the engine follows."""

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
from llmops.gateway.generation.structured.grammar.ambiguity import find_ambiguity
from llmops.gateway.generation.structured.grammar.ebnf_syntax import find_ebnf_error
from llmops.gateway.generation.structured.grammar.errors import GrammarTooComplexError
from llmops.gateway.generation.structured.grammar.work_budget import MAX_STEPS, step_budget
from llmops.gateway.generation.structured.schema_validation import (
    DEFAULT_LIMITS,
    SchemaLimits,
    pattern_problem,
    validate_schema,
)
from llmops.gateway.interfaces import Guide
from llmops.gateway.schemas.request_fields import ResponseFormat, SamplingFields
from llmops.gateway.text.text_thread_pool import INLINE_CHARACTERS

# engines' own guide `json` lets any JSON value through, a bare string as well
JSON_OBJECT = Guide("json_schema", '{"type":"object"}')
# a schema that is a text may be laid out for people
_WHITESPACE_FACTOR = 8
GUIDE_COST = INLINE_CHARACTERS + 1


def parse_guide(request: SamplingFields, limits: SchemaLimits = DEFAULT_LIMITS) -> Guide | None:
    """The one guide that `request` asks for; InvalidRequestError names the field that cannot be used."""
    asked = [param for param in _structured_output_fields(request) if _asks_for_guide(param, request)]
    if len(asked) > 1:
        raise InvalidRequestError(f"Only one of {', '.join(asked)} can be given.", param=asked[1])
    return _GUIDE_FACTORIES[asked[0]](getattr(request, asked[0]), asked[0], limits) if asked else None


def guide_field(request: SamplingFields) -> str:
    """The field that `parse_guide` takes its guide from, to be named in errors."""
    return next(
        (param for param in _structured_output_fields(request) if _asks_for_guide(param, request)), "response_format"
    )


def guide_cost(request: SamplingFields) -> int:
    """What making its guide counts for, in characters of a prompt: always enough for a thread of its own."""
    return GUIDE_COST if _structured_output_fields(request) else 0


def requires_strict_guide(request: SamplingFields) -> bool:
    """Whether what `request` asks for may not be weakened: everything but a response_format that is not `strict`."""
    form = request.response_format
    by_format = guide_field(request) == "response_format" and form is not None and form.json_schema is not None
    return not by_format or form.json_schema.strict is True  # type: ignore[union-attr]


def enforced(guide: Guide, kinds: Sequence[str], strict: bool, param: str) -> Guide:
    """`guide` as a grammar of our own making where the engine takes one (`kinds`).

    Raises InvalidRequestError naming keyword and place for what cannot be enforced; without `strict` that is left out.
    """
    if "ebnf_grammar" not in kinds or guide.kind not in ("json_schema", "regex"):
        return guide
    try:
        made = regex_grammar(guide.text) if guide.kind == "regex" else json_schema_grammar(guide.text, strict)
    except NotEnforceableError as error:
        raise InvalidRequestError(f"'{param}' cannot be used: {error}.", param=param) from None
    return Guide("ebnf_grammar", made)


def _asks_for_guide(name: str, request: SamplingFields) -> bool:
    """response_format `text` asks for nothing."""
    form = request.response_format
    return name != "response_format" or (form is not None and form.type != "text")


def _structured_output_fields(request: SamplingFields) -> list[str]:
    """The fields with a value that may ask for a guide."""
    if _GUIDE_FACTORIES.keys().isdisjoint(request.model_fields_set):
        return []
    return [param for param in _GUIDE_FACTORIES if getattr(request, param) is not None]


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
        if len(value) > _WHITESPACE_FACTOR * limits.size:
            raise InvalidRequestError(
                f"'{param}' has more than {_WHITESPACE_FACTOR * limits.size} characters.", param=param
            )
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidRequestError(f"'{param}' is not valid JSON.", param=param) from None
    return Guide("json_schema", validate_schema(value, param, limits))


def _from_regex(value: str, param: str, limits: SchemaLimits) -> Guide:
    problem = pattern_problem(value, limits)
    if problem:
        raise InvalidRequestError(f"'{param}' cannot be used: {problem}.", param=param)
    return Guide("regex", value)


def _from_choice(value: list[str], param: str, limits: SchemaLimits) -> Guide:
    if not isinstance(value, list) or not all(isinstance(choice, str) and choice for choice in value):
        raise InvalidRequestError(f"'{param}' must be a list of non-empty strings.", param=param)
    if not 0 < len(value) <= limits.choices or sum(map(len, value)) > limits.size:
        raise InvalidRequestError(
            f"'{param}' must have 1 to {limits.choices} choices and {limits.size} characters at most.", param=param
        )
    try:
        return Guide("ebnf_grammar", choice_grammar(tuple(value)))
    except NotEnforceableError as error:
        raise InvalidRequestError(f"'{param}' cannot be used: {error}.", param=param) from None


def _from_grammar(value: str, param: str, limits: SchemaLimits) -> Guide:
    if not isinstance(value, str) or not value.strip() or len(value) > limits.size:
        raise InvalidRequestError(f"'{param}' must be an EBNF text of 1 to {limits.size} characters.", param=param)
    problem = find_ebnf_error(value) or _ambiguity(value)
    if problem:
        raise InvalidRequestError(f"'{param}' cannot be used as an EBNF grammar: {problem}.", param=param)
    return Guide("ebnf_grammar", value)


def _ambiguity(grammar: str) -> str | None:
    try:
        with step_budget(MAX_STEPS):
            return find_ambiguity(grammar)
    except GrammarTooComplexError as error:
        return str(error)


def _from_json_object(value: object, param: str, limits: SchemaLimits) -> Guide | None:
    return JSON_OBJECT if value else None


_GuideFactory = Callable[[Any, str, SchemaLimits], Guide | None]

_STRUCTURED_OUTPUTS: dict[str, _GuideFactory] = {
    "json": _from_json,
    "regex": _from_regex,
    "choice": _from_choice,
    "grammar": _from_grammar,
    "json_object": _from_json_object,
}


def _from_structured_outputs(value: dict[str, Any], param: str, limits: SchemaLimits) -> Guide | None:
    given = {key: part for key, part in value.items() if part is not None}
    unknown = next((key for key in given if key not in _STRUCTURED_OUTPUTS), None)
    if unknown or len(given) != 1:
        which = f"{param}.{unknown}" if unknown else param
        raise InvalidRequestError(f"'{param}' takes exactly one of {', '.join(_STRUCTURED_OUTPUTS)}.", param=which)
    for key, part in given.items():
        return _STRUCTURED_OUTPUTS[key](part, f"{param}.{key}", limits)
    return None


# the fields of a request that may ask for a guide, and what makes it of their value
_GUIDE_FACTORIES: dict[str, _GuideFactory] = {
    "response_format": _from_format,
    "guided_json": _from_json,
    "guided_regex": _from_regex,
    "guided_choice": _from_choice,
    "guided_grammar": _from_grammar,
    "structured_outputs": _from_structured_outputs,
}
