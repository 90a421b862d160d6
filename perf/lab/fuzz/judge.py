"""What an answer may be: a 4xx in OpenAI's envelope or a right 200."""

from __future__ import annotations

import json
from collections.abc import Collection

import httpx


def problem_of(answer: httpx.Response, refusals: Collection[int] = ()) -> str | None:
    """What is wrong with `answer`, if anything; `refusals`: statuses of 500 and more that are right all the same."""
    if 400 <= answer.status_code < 500 or answer.status_code in refusals:
        return _envelope_problem(answer)
    if answer.status_code != 200:
        return f"status {answer.status_code} {answer.text[:300]}"
    try:
        if answer.headers["content-type"].startswith("text/event-stream"):
            return _stream_problem(answer.text)
        return None if isinstance(answer.json(), dict) else "the answer is no object"
    except ValueError as error:
        return f"the answer is not JSON ({error})"


def _envelope_problem(answer: httpx.Response) -> str | None:
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return f"no envelope: {answer.text[:300]}"
    if set(error) != {"message", "type", "param", "code"} or not isinstance(error["message"], str):
        return f"a wrong envelope: {answer.text[:300]}"
    return None


def _stream_problem(text: str) -> str | None:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in data if line != "[DONE]"]
    if any(event.get("error") for event in events):
        return f"an error in the stream: {text[-300:]}"
    last = data[-1] if data else ""
    ended = last == "[DONE]" or (events and events[-1].get("type") in ("response.completed", "response.incomplete"))
    return None if ended and data.count("[DONE]") <= 1 else f"a stream without its end: {text[-300:]}"
