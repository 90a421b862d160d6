"""Tools of the Responses API as functions of chat completions.

A client such as Codex groups functions in namespaces and offers tools that OpenAI's servers run.
Chat templates know only functions. The functions of a namespace therefore get names that begin with
the namespace's name, and a tool that a server would have to run is left out, with a warning to the
client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmops.gateway.errors import InvalidRequestError

_KEYS = ("name", "description", "parameters", "strict")
#: Maximum characters of a namespace's name, which becomes a part of the name of each of its
#: functions. The names of functions have the same maximum.
_MAX_NAMESPACE_CHARACTERS = 128


@dataclass(frozen=True)
class OfferedTools:
    """The functions that are offered to a model.

    Attributes:
        functions: Entries of the field `tools` of chat completions.
        origins: The fields `name` and `namespace` of calls to functions in a namespace, by the
            function's flat name.
        left_out: The types of the tools that were left out, in order.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    origins: dict[str, dict[str, str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def flat_name(name: str, namespace: object) -> str:
    """Return the name by which a model knows a function.

    Args:
        name: The name of the function.
        namespace: The namespace of the function; None for a function without a namespace.
    """
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def offered_tools(tools: Sequence[Mapping[str, Any]]) -> OfferedTools:
    """Return the functions among `tools`; functions in namespaces get flat names.

    Raises:
        InvalidRequestError: A namespace is malformed.
    """
    offered = OfferedTools()
    for at, tool in enumerate(tools):
        kind = tool.get("type")
        if kind == "function":
            offered.functions.append(_function(tool))
        elif kind == "namespace":
            namespace = tool.get("name")
            for member in _members(tool, f"tools[{at}]"):
                if member.get("type") != "function":
                    offered.left_out.append(str(member.get("type")))
                    continue
                name = str(member.get("name"))
                flat = flat_name(name, namespace)
                offered.functions.append(_function({**member, "name": flat}))
                offered.origins[flat] = {"name": name, "namespace": str(namespace)}
        else:
            offered.left_out.append(str(kind))
    return offered


def _members(namespace: Mapping[str, Any], param: str) -> Iterator[Mapping[str, Any]]:
    name, members = namespace.get("name"), namespace.get("tools")
    if not isinstance(name, str) or len(name) > _MAX_NAMESPACE_CHARACTERS or not isinstance(members, list):
        raise InvalidRequestError(
            f"'{param}' is a namespace and needs a name of at most {_MAX_NAMESPACE_CHARACTERS} characters and a list "
            "of tools.",
            param=param,
        )
    for at, member in enumerate(members):
        if not isinstance(member, Mapping):
            raise InvalidRequestError(f"'{param}.tools[{at}]' must be an object.", param=f"{param}.tools[{at}]")
        yield member


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {key: tool[key] for key in _KEYS if key in tool}}
