"""A finished request for traces and the access log, and the timeline of its stages.

The functions are pure: they use neither clocks nor I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llmops.gateway.interfaces import FAILED_FINISH_REASONS, Caller, Failover, Outcome
from llmops.gateway.telemetry.metrics import AnswerMeter
from llmops.gateway.telemetry.trace_context import TraceContext

#: Names of the spans by stage, in the order of the stages. A stage ends at its mark in
#: RequestContext.
SPAN_NAMES = {
    "auth": "auth",
    "rate_limit": "rate_limit",
    "parse": "route",
    "queue": "queue",
    "template": "template",
    "tokenise": "tokenise",
    "submit": "schedule",
}
_STAGE_ORDER = list(SPAN_NAMES)


class FinishedRequest(NamedTuple):
    """A finished request, with everything that traces and the access log show.

    `at` is the Unix time of `ended`. All other times are seconds of perf_counter. `meter` is None
    if the request generates no tokens. The other fields are copied from RequestContext.
    """

    at: float
    started: float
    ended: float
    request_id: str
    route: str
    caller: Caller
    model: str
    outcome: Outcome
    stages: Mapping[str, float]
    meter: AnswerMeter | None = None
    replica: str = ""
    moves: Sequence[Failover] = ()
    continued: str = ""
    trace: TraceContext | None = None

    @property
    def failed(self) -> bool:
        return is_server_failure(self.outcome)


def is_server_failure(outcome: Outcome) -> bool:
    """Return True if the gateway or the engine failed.

    Errors caused by the client and disconnects of the client do not count.
    """
    return outcome.status >= 500 or (outcome.status == 200 and outcome.finish in FAILED_FINISH_REASONS)


class TimelineStage(NamedTuple):
    name: str
    begin: float
    end: float


class RequestTimeline(NamedTuple):
    """The stages of a request, without gaps or overlaps.

    Attributes:
        stages: Stages in the gateway, in order.
        call: Time of the engine's work, or None if the request did not reach the engine.
        inside: Parts of `call`: prefill and decode.
    """

    stages: Sequence[TimelineStage]
    call: TimelineStage | None = None
    inside: Sequence[TimelineStage] = ()


def build_timeline(one: FinishedRequest) -> RequestTimeline:
    """Return the timeline of a finished request."""
    stages, at, done, meter = [], one.started, "", one.meter
    for done, end in [*(one.trace.marks if one.trace is not None else ()), *_stage_ends(one)]:
        stages.append(TimelineStage(SPAN_NAMES.get(done, done), at, max(at, end)))
        at = stages[-1].end
    ended = max(at, one.ended)
    if meter is None and one.model:
        # an encoder works until the end of its request
        return RequestTimeline(stages, TimelineStage("call", at, ended))
    if meter is None or "submit" not in one.stages:
        return RequestTimeline([*stages, TimelineStage(_next_span_name(done), at, ended)])
    if not meter.first:
        return RequestTimeline(stages, TimelineStage("call", at, ended), [TimelineStage("prefill", at, ended)])
    # keep the stages in order: sums of measured times may be off by a rounding error
    first = max(at, meter.first)
    last = max(first, meter.last)
    inside = [TimelineStage("prefill", at, first), TimelineStage("decode", first, last)]
    return RequestTimeline(
        [*stages, TimelineStage("stream", last, max(last, ended))], TimelineStage("call", at, last), inside
    )


def _stage_ends(one: FinishedRequest) -> list[tuple[str, float]]:
    ends, at = [], one.started
    for name, seconds in one.stages.items():
        at += seconds
        ends.append((name, at))
    return ends


def _next_span_name(last: str) -> str:
    """Return the name of the stage after `last`, in which the request ended."""
    following = _STAGE_ORDER[_STAGE_ORDER.index(last) + 1 :] if last in SPAN_NAMES else _STAGE_ORDER
    return SPAN_NAMES[following[0]] if following else "stream"
