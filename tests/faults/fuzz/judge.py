"""The judge of answers: a 4xx in its API's envelope or a valid 200."""

import json
from collections.abc import Collection
from typing import Any

import httpx

# what ends a stream of typed events
_LAST = ("response.completed", "response.incomplete", "message_stop")


def problem_of(answer: httpx.Response, refusals: Collection[int] = ()) -> str | None:
    """Return the fault of `answer`, or None.

    Statuses of 500 and above in `refusals` are valid.
    """
    if 400 <= answer.status_code < 500 or answer.status_code in refusals:
        return _envelope_problem(answer)
    if answer.status_code != 200:
        return f"status {answer.status_code} {answer.text[:300]}"
    try:
        if answer.headers["content-type"].startswith("text/event-stream"):
            return _stream_problem(answer.text)
        return None if isinstance(answer.json(), dict) else "the answer is not an object"
    except ValueError as error:
        return f"the answer is not JSON ({error})"


def _envelope_problem(answer: httpx.Response) -> str | None:
    try:
        body = answer.json()
        error = body["error"]
        right = _is_anthropic(body, answer) if "type" in body else set(error) == {"message", "type", "param", "code"}
    except (ValueError, KeyError, TypeError):
        return f"no envelope: {answer.text[:300]}"
    if not right or not isinstance(error["message"], str):
        return f"a wrong envelope: {answer.text[:300]}"
    return None


def _is_anthropic(body: dict[str, Any], answer: httpx.Response) -> bool:
    fields = {"type", "message", "details"} if "details" in body["error"] else {"type", "message"}
    named = body["request_id"] == answer.headers.get("request-id")
    return body["type"] == "error" and set(body["error"]) == fields and named


def _stream_problem(text: str) -> str | None:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in data if line != "[DONE]"]
    if any(event.get("error") for event in events):
        return f"an error in the stream: {text[-300:]}"
    last = data[-1] if data else ""
    ended = last == "[DONE]" or (events and events[-1].get("type") in _LAST)
    return None if ended and data.count("[DONE]") <= 1 else f"a stream without its end: {text[-300:]}"
