"""The part of a long conversation that is sent to the model.

The rule: system messages at the beginning and the newest turns stay, and the oldest turns are
dropped until the answer has room. The room is what the request asks for, else a quarter of the
context. A turn begins with a user message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from llmops.gateway.routing.served_models import GenerativeModel

#: Tokens that a chat template may write around one message.
MESSAGE_OVERHEAD = 8
#: Tokens that a chat template may write besides the messages, such as a system prompt of its own.
TEMPLATE_OVERHEAD = 64


class TruncatedHistory(NamedTuple):
    """The messages that are sent, and the number of messages that were dropped before them."""

    messages: list[dict[str, Any]]
    dropped: int


def reserved_output_tokens(model: GenerativeModel, wanted: int | None) -> int:
    """Return the tokens that are kept free for the answer."""
    return min(wanted or model.card.max_seq_len // 4, model.card.max_seq_len - 1)


def truncate_history(messages: Sequence[dict[str, Any]], model: GenerativeModel, room: int) -> TruncatedHistory:
    """Drop the oldest turns that do not fit into the context of `model`.

    An answer of `room` tokens must fit beside the turns that are kept. The newest turn is always
    kept: the request's own check decides whether it fits.
    """
    limit = model.card.max_seq_len - room - TEMPLATE_OVERHEAD
    texts = [_text(message) for message in messages]
    # a token stands for at least one byte
    if sum(len(text.encode()) + MESSAGE_OVERHEAD for text in texts) <= limit:
        return TruncatedHistory(list(messages), 0)

    def size(at: int) -> int:
        # a text that is longer than the context need not be read to its end
        ids = model.tokenizer.encode_beginning(texts[at], max(limit, 0), add_special_tokens=False)
        return len(ids) + MESSAGE_OVERHEAD

    first = next((at for at, one in enumerate(messages) if one["role"] not in ("system", "developer")), len(messages))
    starts = [at for at in range(first, len(messages)) if messages[at]["role"] == "user"] or [first]
    left = limit - sum(map(size, range(first)))
    keep, end = starts[-1], len(messages)
    for start in reversed(starts):
        for at in range(start, end):
            left -= size(at)
            if left < 0:
                break
        if left < 0:
            break
        keep = end = start
    if keep == starts[0]:
        keep = first  # an answer before the first question belongs to it
    return TruncatedHistory([*messages[:first], *messages[keep:]], keep - first)


def _text(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls") or ()
    return f"{message.get('content') or ''}{''.join(call['function']['arguments'] for call in calls)}"
