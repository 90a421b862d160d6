"""Recording of an OpenAI answer while it arrives."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from llmops.input_files import MALFORMED
from llmops.perf.clients.event_template import EventTemplate
from llmops.perf.records import Record, Request
from llmops.untrusted_text import escape_unsafe

#: Maximum number of bytes of a line of server-sent events, or of a response without events. The
#: text of the longest answers is shorter.
MAX_REST_BYTES = 4 * 2**20
#: Maximum number of tokens that a server may report for a request; no real request reaches it.
MAX_TOKENS = 2**31
TEXT_KEYS = ("content", "reasoning_content", "reasoning", "refusal")


class ResponseRecorder:
    """A receiver of one response that fills a `Record`, from server-sent events or one JSON body."""

    def __init__(
        self, record: Record, request: Request, stream: bool, done: asyncio.Future[None], abort: Callable[[], None]
    ) -> None:
        self._record = record
        self._request = request
        self._stream = stream
        self._done = done
        self._abort = abort
        self._status = 0
        self._rest = b""
        self._ended = False
        self._shape: EventTemplate | None = None
        self._text: list[str] = []
        self._calls: set[int] = set()

    def headers(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status
        self._stream = status == 200 and headers.get(b"content-type", b"").startswith(b"text/event-stream")
        overhead = headers.get(b"x-llmops-overhead-ms")
        if overhead is not None:
            self._record.overhead_ms = float(overhead)

    def body(self, data: bytes, now: float) -> None:
        self._rest += data
        if len(self._rest) > MAX_REST_BYTES:
            self._abort()
            self._finish("too_large")
            return
        if not self._stream:
            return
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)
                if self._done.done():
                    return

    def _event(self, payload: bytes, now: float) -> None:
        if self._shape is not None and self._shape.fits(payload):
            self._token(now)
            return
        if payload == b"[DONE]":
            self._ended = True
            return
        try:
            event = json.loads(payload)
            if "error" in event:
                self._finish(f"stream_error {_code(event['error'])}")
                return
            carried = self._choices(event.get("choices") or [])
        except MALFORMED:
            self._finish("protocol")
            return
        if event.get("usage") and not self._usage(event["usage"]):
            self._finish("protocol")
            return
        if carried:
            self._learn(payload)
            self._token(now)

    def _learn(self, payload: bytes) -> None:
        # The caller needs the text or the tool calls, so every event is parsed.
        if not (self._request.keep_text or self._request.tools or self._record.finish):
            self._shape = EventTemplate.of(payload)

    def _choices(self, choices: list[dict[str, Any]]) -> bool:
        carried = False
        for choice in choices:
            if choice.get("finish_reason"):
                self._record.finish = str(choice["finish_reason"])
            delta = choice.get("delta") or choice
            carried |= self._delta(delta)
        return carried

    def _delta(self, delta: dict[str, Any]) -> bool:
        text = delta.get("content") or delta.get("text")
        if text:
            if not isinstance(text, str):
                raise ValueError("the text of a delta is not a string")
            if self._request.keep_text:
                self._text.append(text)
            return True
        calls = delta.get("tool_calls") or ()
        self._calls |= {call.get("index", 0) for call in calls}
        return bool(calls) or any(delta.get(key) for key in TEXT_KEYS)

    def _token(self, now: float) -> None:
        record = self._record
        record.chunks.append(now)
        if record.first is None:
            record.first = now
        if record.counted:
            record.tokens_out += 1
        if self._request.cancel_after is not None and len(record.chunks) >= self._request.cancel_after:
            record.cancelled = True
            self._abort()
            self._finish(None)

    def _usage(self, usage: Any) -> bool:
        """Store the token counts of `usage`. Return False if they are not valid counts."""
        counts = (
            [usage.get(name) for name in ("prompt_tokens", "completion_tokens")] if isinstance(usage, dict) else [-1]
        )
        if not all(count is None or (type(count) is int and 0 <= count <= MAX_TOKENS) for count in counts):
            return False
        self._record.tokens_in, output = counts
        if output is not None:
            self._record.tokens_out = output
            self._record.counted = False
        return True

    def complete(self) -> None:
        if self._status != 200:
            self._finish(f"http_{self._status} {_body_code(self._rest)}".strip())
        elif self._stream:
            self._finish(None if self._ended else "truncated")
        else:
            self._whole()

    def _whole(self) -> None:
        try:
            body = json.loads(self._rest)
            for choice in body["choices"]:
                self._record.finish = choice.get("finish_reason")
                self._delta(choice.get("message") or choice)
            if not self._usage(body.get("usage") or {}):
                raise ValueError("its usage has no valid token counts")
        except MALFORMED:
            self._finish("protocol")
            return
        self._finish(None)

    def failed(self, kind: str) -> None:
        # A server may close the connection right after [DONE], which is no failure.
        self._finish(None if self._ended else kind)

    def time_out(self) -> None:
        self._abort()
        self._finish("timeout")

    def _finish(self, error: str | None) -> None:
        if self._done.done():
            return
        record = self._record
        record.error = error
        record.end = time.perf_counter()
        if error is not None:
            self._abort_unless_complete()
        if self._request.keep_text:
            record.text = "".join(self._text)
        record.tool_calls = len(self._calls)
        self._done.set_result(None)

    def _abort_unless_complete(self) -> None:
        if self._status == 200 and self._stream and not self._ended:
            self._abort()


def _code(error: Any) -> str:
    if not isinstance(error, dict):
        return "error"
    return escape_unsafe(str(error.get("code") or error.get("type") or "error"), 60)


def _body_code(body: bytes) -> str:
    try:
        return _code(json.loads(body)["error"])
    except MALFORMED:
        return ""
