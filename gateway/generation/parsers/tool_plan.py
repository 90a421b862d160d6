"""The plan for a request's tools.

A plan has the definitions of the tools for the prompt, the engine's guide and the parser of the
answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.generation.parsers.families import PARSERS, detect_family
from llmops.gateway.generation.parsers.forced_calls import (
    AnswerOrCallsProcessor,
    NamedCallProcessor,
    RequiredCallsProcessor,
)
from llmops.gateway.generation.parsers.harmony import is_harmony
from llmops.gateway.generation.parsers.output_processor import (
    OutputDelta,
    OutputProcessor,
    ProcessorChain,
    ToolCallDelta,
)
from llmops.gateway.generation.parsers.tool_parser import new_call_id
from llmops.gateway.generation.structured.schema_references import rebase_references
from llmops.gateway.generation.structured.schema_validation import (
    DEFAULT_LIMITS,
    SchemaLimits,
    parameters_schema,
    tool_calls_schema,
    validate_schema,
)
from llmops.gateway.interfaces import Guide
from llmops.gateway.schemas.chat_request import AllowedToolsChoice, NamedToolChoice, Tool, ToolChoice


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The plan for the tools of one request.

    Attributes:
        definitions: The tools that the template shows to the model.
        guide: The guide that replaces the request's guide; None to keep the request's guide.
        processor: Makes the processor of one choice; None if the text needs no processor.
        special_tokens: Special tokens that must stay visible in the text.
        first_call_only: True if a caller that makes the processor itself must wrap it in
            FirstCallOnly.
    """

    definitions: list[dict[str, Any]] = field(default_factory=list)
    guide: Guide | None = None
    processor: Callable[[], OutputProcessor] | None = None
    special_tokens: tuple[str, ...] = ()
    first_call_only: bool = False


def plan_tools(
    tools: Sequence[Tool] | None,
    choice: ToolChoice | None,
    parallel: bool | None,
    template: str,
    guide: Guide | None = None,
    limits: SchemaLimits = DEFAULT_LIMITS,
) -> ToolPlan:
    """Return the plan for one request.

    Args:
        tools: The request's tools.
        choice: The request's `tool_choice`.
        parallel: The request's `parallel_tool_calls`.
        template: The model's chat template.
        guide: The guide of the request's `response_format`.
        limits: The limits of the tools' schemas.

    Raises:
        InvalidRequestError: The tools cannot be used, or not together with the rest of the request.
    """
    offered = _validate_tools(tools or [], limits)
    mode, callable_tools = _resolve_choice(choice, offered)
    if mode == "none" or not offered:
        return ToolPlan(guide=guide)
    definitions = [_definition(tool) for tool in offered.values()]
    family = detect_family(template)
    new_id = PARSERS[family].new_id if family else new_call_id
    if mode == "named":
        (tool,) = callable_tools.values()
        forced = validate_schema(parameters_schema(tool.function.parameters), "tools", limits)
        named = tool.function.name
        return ToolPlan(definitions, Guide("json_schema", forced), lambda: NamedCallProcessor(named, new_id))
    many = parallel is not False
    if mode == "required":
        return ToolPlan(definitions, _calls_guide(callable_tools, many, limits), lambda: RequiredCallsProcessor(new_id))
    if guide is not None:
        union = _answer_or_calls(guide, callable_tools, many, limits)
        return ToolPlan(definitions, union, lambda: AnswerOrCallsProcessor(RequiredCallsProcessor(new_id)))
    if is_harmony(template):
        # The parser of harmony is needed with and without tools.
        return ToolPlan(definitions, first_call_only=not many)
    if family is None:
        return ToolPlan(definitions)
    parser = PARSERS[family]
    functions = {name: tool.function.parameters for name, tool in callable_tools.items()}
    return ToolPlan(
        definitions,
        processor=lambda: parser(functions) if many else FirstCallOnly([parser(functions)]),
        special_tokens=parser.special_tokens,
    )


class FirstCallOnly(ProcessorChain):
    """A chain that drops all tool calls but the first.

    The chain implements `parallel_tool_calls: false` for answers without a grammar.
    """

    def feed(self, text: str) -> list[OutputDelta]:
        return self._first(super().feed(text))

    def finish(self) -> list[OutputDelta]:
        return self._first(super().finish())

    @staticmethod
    def _first(pieces: Iterable[OutputDelta]) -> list[OutputDelta]:
        return [piece for piece in pieces if not isinstance(piece, ToolCallDelta) or piece.index == 0]


def _validate_tools(tools: Sequence[Tool], limits: SchemaLimits) -> dict[str, Tool]:
    offered: dict[str, Tool] = {}
    # A grammar is compiled only for forced calls, whose schemas are checked again then.
    shown = replace(limits, grammar=False)
    for at, tool in enumerate(tools):
        if tool.function.name in offered:
            raise InvalidRequestError(
                f"Two tools have the name '{tool.function.name}'; rename one.", param=f"tools[{at}]"
            )
        validate_schema(parameters_schema(tool.function.parameters), f"tools[{at}].function.parameters", shown)
        offered[tool.function.name] = tool
    return offered


def _resolve_choice(choice: ToolChoice | None, offered: dict[str, Tool]) -> tuple[str, dict[str, Tool]]:
    if isinstance(choice, NamedToolChoice):
        return "named", _allowed_tools([choice], offered, "tool_choice")
    if isinstance(choice, AllowedToolsChoice):
        return choice.allowed_tools.mode, _allowed_tools(
            choice.allowed_tools.tools, offered, "tool_choice.allowed_tools"
        )
    if choice == "required" and not offered:
        raise InvalidRequestError(
            "tool_choice is 'required', but there are no tools; send some, or leave tool_choice out.",
            param="tool_choice",
        )
    return choice or "auto", offered


def _allowed_tools(choices: Sequence[NamedToolChoice], offered: dict[str, Tool], param: str) -> dict[str, Tool]:
    names = [choice.function.name for choice in choices]
    missing = next((name for name in names if name not in offered), None)
    if missing is not None or not names:
        raise InvalidRequestError(
            f"tool_choice names '{missing or ''}', which is not among the tools; name one of them.", param=param
        )
    return {name: offered[name] for name in names}


def _definition(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.function.name, "description": tool.function.description or ""}
    function["parameters"] = rebase_references(parameters_schema(tool.function.parameters), "#")
    return {"type": "function", "function": function}


def _functions(offered: dict[str, Tool]) -> list[tuple[str, dict[str, Any] | None]]:
    return [(name, tool.function.parameters) for name, tool in offered.items()]


def _calls_guide(offered: dict[str, Tool], many: bool, limits: SchemaLimits) -> Guide:
    return Guide("json_schema", validate_schema(tool_calls_schema(_functions(offered), many), "tools", limits))


def _answer_or_calls(guide: Guide, offered: dict[str, Tool], many: bool, limits: SchemaLimits) -> Guide:
    """Return a guide for either the JSON object of `response_format` or a list of calls.

    The first character, { or [, determines which of the two the text is.

    Args:
        guide: The guide of `response_format`.
        offered: The offered functions by name.
        many: True to allow several calls.
        limits: The limits of the schema that combines the two.

    Raises:
        InvalidRequestError: `guide` is not for a JSON object, or the schema exceeds a limit.
    """
    schema = json.loads(guide.text) if guide.kind == "json_schema" else None
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise InvalidRequestError(
            "Tools with tool_choice 'auto' can be combined only with a response_format for a JSON object; ask for an "
            "object, or set tool_choice to 'none' or 'required'.",
            param="response_format",
        )
    calls = tool_calls_schema(_functions(offered), many)
    definitions = {**calls.pop("$defs"), "answer": rebase_references(schema, "#/$defs/answer")}
    union = {"$defs": definitions, "anyOf": [{"$ref": "#/$defs/answer"}, calls]}
    return Guide("json_schema", validate_schema(union, "response_format", limits))
