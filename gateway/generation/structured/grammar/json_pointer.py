"""JSON pointers into a schema."""

from __future__ import annotations

from typing import Any


def resolve_pointer(root: object, reference: str) -> Any:
    """What `reference` (`#/$defs/a`) leads to. Raises LookupError, ValueError or TypeError where it leads nowhere."""
    target: Any = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        target = target[int(name)] if isinstance(target, list) else target[name]
    return target
