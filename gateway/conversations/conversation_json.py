"""Conversations as JSON, for the chat page, exports and archives."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from llmops.gateway.conversations.conversation_store import Branch, public_id
from llmops.gateway.conversations.conversation_turn import answer_run_id
from llmops.gateway.conversations.items import to_messages
from llmops.store.conversations import Conversation, StoredMessage


def export_line(branch: Branch) -> bytes:
    """Return a conversation with the messages of all its branches as one line of JSON."""
    parents = {one.id: one.item_id for one in branch.every}
    messages = [{**message_object(one), "parent_id": parents.get(one.parent_id or "")} for one in branch.every]
    head = branch.messages[-1].item_id if branch.messages else None
    line = {**conversation_summary(branch.conversation), "head_id": head, "messages": messages}
    return (json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def conversation_summary(conversation: Conversation) -> dict[str, Any]:
    return {
        "id": public_id(conversation),
        "object": "conversation",
        "title": conversation.title,
        "model": conversation.model,
        "system_prompt": conversation.system_prompt,
        "metadata": json.loads(conversation.metadata),
        "created_at": unix_seconds(conversation.created_at),
        "updated_at": unix_seconds(conversation.updated_at),
    }


def conversation_object(branch: Branch) -> dict[str, Any]:
    """Return a conversation with the messages of its current branch as a JSON object."""
    siblings: dict[str | None, list[str]] = {}
    for message in branch.every:
        siblings.setdefault(message.parent_id, []).append(message.item_id)
    messages = [{**message_object(one), "siblings": siblings[one.parent_id]} for one in branch.messages]
    tokens = sum((one.token_count or 0) + (one.prompt_tokens or 0) for one in branch.messages)
    return {**conversation_summary(branch.conversation), "messages": messages, "total_tokens": tokens}


def message_object(message: StoredMessage) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "id": message.item_id,
        "role": message.role,
        "content": message.content,
        "status": message.status,
        "created_at": unix_seconds(message.created_at),
    }
    if message.role != "assistant":
        return shown
    if message.items is not None:
        merged = to_messages(json.loads(message.items))
        shown["reasoning_content"] = "".join(one.get("reasoning_content") or "" for one in merged) or None
        shown["tool_calls"] = [call for one in merged for call in one.get("tool_calls") or ()]
    cost = message.cost_micros
    return {
        **shown,
        "model": message.model,
        "finish_reason": message.finish_reason,
        "usage": {"prompt_tokens": message.prompt_tokens, "completion_tokens": message.token_count},
        "cost_usd": None if cost is None else cost / 1e6,
        "latency_ms": message.latency_ms,
        "run_id": answer_run_id(message) if message.status == "in_progress" else None,
    }


def unix_seconds(time: datetime) -> float:
    return round(time.timestamp(), 3)
