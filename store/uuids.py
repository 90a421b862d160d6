"""UUIDs as text, in the one form in which they are compared."""

from __future__ import annotations

import re
from uuid import UUID

_CANONICAL = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def canonical_uuid(text: str) -> str:
    """Lower-case, with four dashes. Raises ValueError for what is no UUID."""
    return text if _CANONICAL.fullmatch(text) else str(UUID(text))
