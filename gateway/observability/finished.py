"""A request that is over, as traces and the access log tell of it. Pure: times are those that were taken on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llmops.gateway.messages import Caller, Move, Outcome
from llmops.gateway.observability.metrics import BROKEN, Meter
from llmops.gateway.observability.trace_context import Trace

# the stages of a request by their spans, in the order in which they come; a mark of RequestContext ends each
SPANS = {
    "auth": "auth",
    "rate_limit": "rate_limit",
    "parse": "route",
    "queue": "queue",
    "template": "template",
    "tokenise": "tokenise",
    "submit": "schedule",
}
_ORDER = list(SPANS)


class Finished(NamedTuple):
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
    meter: Meter | None = None
    replica: str = ""
    moves: Sequence[Move] = ()
    continued: str = ""
    trace: Trace | None = None

    @property
    def failed(self) -> bool:
        return has_failed(self.outcome)


def has_failed(outcome: Outcome) -> bool:
    """For what gateway or engine are to blame; a client's own mistakes, and its leaving, are none."""
    return outcome.status >= 500 or (outcome.status == 200 and outcome.finish in BROKEN)


class Stage(NamedTuple):
    name: str
    begin: float
    end: float


class Timeline(NamedTuple):
    """`stages` are one after the other and leave nothing out of the request but `call`, the work of its engine, whose
    parts are `inside`; None where it never came so far."""

    stages: Sequence[Stage]
    call: Stage | None = None
    inside: Sequence[Stage] = ()


def timeline(one: Finished) -> Timeline:
    """Where its time went."""
    stages, at, done, meter = [], one.started, "", one.meter
    for done, end in [*(one.trace.marks if one.trace is not None else ()), *_ends(one)]:
        stages.append(Stage(SPANS.get(done, done), at, max(at, end)))
        at = stages[-1].end
    ended = max(at, one.ended)
    if meter is None and one.model:
        # an encoder's work
        return Timeline(stages, Stage("call", at, ended))
    if meter is None or "submit" not in one.stages:
        return Timeline([*stages, Stage(_after(done), at, ended)])
    if not meter.first:
        return Timeline(stages, Stage("call", at, ended), [Stage("prefill", at, ended)])
    # sums of what was measured may be off by a rounding
    first = max(at, meter.first)
    last = max(first, meter.last)
    inside = [Stage("prefill", at, first), Stage("decode", first, last)]
    return Timeline([*stages, Stage("stream", last, max(last, ended))], Stage("call", at, last), inside)


def _ends(one: Finished) -> list[tuple[str, float]]:
    ends, at = [], one.started
    for name, seconds in one.stages.items():
        at += seconds
        ends.append((name, at))
    return ends


def _after(last: str) -> str:
    """The span of the stage in which a request ended that finished the one before."""
    following = _ORDER[_ORDER.index(last) + 1 :] if last in SPANS else _ORDER
    return SPANS[following[0]] if following else "stream"
