"""A request that is over, as traces and the access log tell of it. Pure: times are those that were taken on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llmops.gateway.interfaces import Caller, Failover, Outcome
from llmops.gateway.telemetry.metrics import FAILED_FINISH_REASONS, AnswerMeter
from llmops.gateway.telemetry.trace_context import TraceContext

# the stages of a request by their spans, in the order in which they come; a mark of RequestContext ends each
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
    """`at` is the Unix time of `ended`; `started` and `ended` are, as all times here, seconds of perf_counter.

    `meter` is None where nothing was to be generated; the rest is as in RequestContext.
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
    """For what gateway or engine are to blame; a client's own mistakes, and its leaving, are none."""
    return outcome.status >= 500 or (outcome.status == 200 and outcome.finish in FAILED_FINISH_REASONS)


class TimelineStage(NamedTuple):
    name: str
    begin: float
    end: float


class RequestTimeline(NamedTuple):
    """`stages` are one after the other and leave nothing out of the request but `call`, the work of its engine, whose
    parts are `inside`; None where it never came so far."""

    stages: Sequence[TimelineStage]
    call: TimelineStage | None = None
    inside: Sequence[TimelineStage] = ()


def build_timeline(one: FinishedRequest) -> RequestTimeline:
    """Where its time went."""
    stages, at, done, meter = [], one.started, "", one.meter
    for done, end in [*(one.trace.marks if one.trace is not None else ()), *_stage_ends(one)]:
        stages.append(TimelineStage(SPAN_NAMES.get(done, done), at, max(at, end)))
        at = stages[-1].end
    ended = max(at, one.ended)
    if meter is None and one.model:
        # an encoder's work
        return RequestTimeline(stages, TimelineStage("call", at, ended))
    if meter is None or "submit" not in one.stages:
        return RequestTimeline([*stages, TimelineStage(_next_span_name(done), at, ended)])
    if not meter.first:
        return RequestTimeline(stages, TimelineStage("call", at, ended), [TimelineStage("prefill", at, ended)])
    # sums of what was measured may be off by a rounding
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
    """The span of the stage in which a request ended that finished the one before."""
    following = _STAGE_ORDER[_STAGE_ORDER.index(last) + 1 :] if last in SPAN_NAMES else _STAGE_ORDER
    return SPAN_NAMES[following[0]] if following else "stream"
