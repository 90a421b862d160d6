"""Tool definitions for tool-call workloads, and the check that what came back can be used."""

from __future__ import annotations

import json
from typing import Any

_SUBJECTS = ("weather", "time", "population", "exchange_rate", "flight", "hotel", "news", "stock_price")


def tool_definitions(count: int) -> list[dict[str, Any]]:
    """`count` function tools in OpenAI's format, all of the same shape and size."""
    return [_tool(index) for index in range(count)]


def _tool(index: int) -> dict[str, Any]:
    subject = _SUBJECTS[index % len(_SUBJECTS)]
    suffix = "" if index < len(_SUBJECTS) else f"_{index // len(_SUBJECTS)}"
    parameters = {
        "type": "object",
        "properties": {
            "place": {"type": "string", "description": "City and country"},
            "unit": {"type": "string", "enum": ["metric", "imperial"]},
        },
        "required": ["place"],
    }
    description = f"Get the current {subject.replace('_', ' ')} of a place"
    return {
        "type": "function",
        "function": {"name": f"get_{subject}{suffix}", "description": description, "parameters": parameters},
    }


def is_valid_call(name: str, arguments: str, tools: list[dict[str, Any]]) -> bool:
    """True when `name` is one of `tools` and `arguments` is a JSON object with all its required keys."""
    by_name = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    if name not in by_name:
        return False
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return False
    return isinstance(value, dict) and all(key in value for key in by_name[name].get("required", ()))
