"""Blocks that an agent puts before its system prompt, and that differ in each of its sessions.

The prefix cache finds a prompt from its first token on, so one such block in front of 20,000 tokens
of instructions and tools makes every session read all of them again. Only what is listed here is
left out, by client and version; a block that is not listed stays in the prompt.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from llmops.gateway.api.anthropic.schemas import ResultBlock


class SessionBlock(NamedTuple):
    """A system block that says nothing to the model.

    Attributes:
        client: The client that sends it, with the newest version in which it was seen.
        name: Its name in `x-llmops-ignored`.
        pattern: Matches the whole text of the block.
    """

    client: str
    name: str
    pattern: re.Pattern[str]


#: The blocks that are left out. The billing header holds a hash of the session.
SESSION_BLOCKS = (
    SessionBlock(
        "Claude Code 2.1.330",
        "system.x-anthropic-billing-header",
        re.compile(r"x-anthropic-billing-header: [^\n]{1,400}\n?"),
    ),
)


def without_session_blocks(
    system: str | list[ResultBlock] | None,
) -> tuple[str | list[ResultBlock] | None, list[str]]:
    """Return the system prompt without a listed block at its beginning.

    The second item holds the names of the parts that were left out.
    """
    if not isinstance(system, list) or len(system) < 2:
        return system, []
    for block in SESSION_BLOCKS:
        if block.pattern.fullmatch(getattr(system[0], "text", None) or ""):
            return system[1:], [block.name]
    return system, []
