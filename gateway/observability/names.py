"""Every metric of the gateway: what it is called, which labels it has, what it means. docs/metrics.md is made of this.

What begins with `llm_` and `gpu_` is what operators look at and alerts are made of; `llmops_` is about the gateway.
Every label has a bounded set of values: models that are served, routes that exist, tiers up to a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
# NVIDIA's gauges of an engine model on Triton's page, which our own engine models have too
ENGINE_REQUESTS, ENGINE_BLOCKS = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
# finer where objectives are
FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0)
PER_TOKEN_MS = (1.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 25.0, 30.0, 40.0, 50.0, 75.0, 100.0, 150.0, 250.0, 500.0, 1000.0)


@dataclass(frozen=True)
class Name:
    """One metric family under the name that Prometheus shows (a counter's ends in `_total`)."""

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS


class Table(list[Name]):
    """Names in the order in which /metrics and the docs have them."""

    def counter(self, name: str, meaning: str, *labels: str) -> Name:
        return self._add(Name(name, "counter", meaning, labels))

    def gauge(self, name: str, meaning: str, *labels: str) -> Name:
        return self._add(Name(name, "gauge", meaning, labels))

    def histogram(self, name: str, meaning: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Name:
        return self._add(Name(name, "histogram", meaning, labels, buckets))

    def _add(self, name: Name) -> Name:
        self.append(name)
        return name


GATEWAY = Table()
_g = GATEWAY

TTFT = _g.histogram("llm_ttft_seconds", "From the request's arrival to its first token.", "model", buckets=FIRST_TOKEN)
TPOT = _g.histogram("llm_tpot_ms", "Mean time per token after the first, per answer.", "model", buckets=PER_TOKEN_MS)
QUEUE_DEPTH = _g.gauge(
    "llm_queue_depth", "Requests that wait for their first token; `priority` is the caller's tier.", "model", "priority"
)
ANSWERS = _g.counter(
    "llmops_answers_total",
    "Answers that are over, by how they kept the model's objectives (see Goodput).",
    "model",
    "outcome",
)
PROMPT_TOKENS = _g.counter("llmops_prompt_tokens_total", "Tokens of the prompts.", "model")
LOOKED_UP = _g.counter(
    "llmops_prefix_lookup_tokens_total",
    "Prompt tokens for which the engine reported whether they were cached.",
    "model",
)
CACHED = _g.counter("llmops_prefix_cached_tokens_total", "Those of them that were in the prefix cache.", "model")
COMPLETION_TOKENS = _g.counter("llmops_completion_tokens_total", "Tokens generated for answers.", "model")
CANCELLED = _g.counter("llmops_cancelled_requests_total", "Requests whose client went away.", "model")
ACTIVE = _g.gauge("llmops_active_streams", "Answers in progress.", "model")
ITL = _g.histogram("llmops_inter_token_latency_seconds", "Between two messages of an answer, per token.", "model")
DURATION = _g.histogram("llmops_request_duration_seconds", "From the request's arrival to its last token.", "model")
REQUESTS = _g.counter("llmops_requests_total", "Requests that are over, by route and HTTP status.", "route", "status")
OVERHEAD = _g.histogram("llmops_overhead_seconds", "The gateway's own time until the answer begins (`total`).", "stage")
STAGES = _g.histogram(
    "llmops_stage_seconds",
    "What the time until the answer begins (a stream's first bytes, else all of it) was spent on: parse, queue, "
    "template, tokenise, submit, upstream, detokenise, write.",
    "stage",
)
MIGRATIONS = _g.counter(
    "llmops_migrations_total",
    "Answers that moved to another replica, by why they left: lost, failed, refused, drain, suspect, preempted.",
    "reason",
)
IGNORED = _g.counter("llmops_ignored_fields_total", "Request fields accepted and ignored.", "field")
REFUSED = _g.counter(
    "llmops_refused_connections_total",
    "Connections closed because a client exceeded a bound, or because there was no place: client (its answer was not "
    "read), connections, header, header_bytes, invalid, pipeline (too many requests wait behind others), room (idle "
    "when a new connection needed its place), unread (all unread answers hold too much).",
    "reason",
)
MISROUTED = _g.counter(
    "llmops_misrouted_total", "Answers from another engine than the replica's card announces; should be 0.", "model"
)
PREFIX_UNSTABLE = _g.gauge(
    "llmops_prefix_unstable",
    "Share of a tenant's prompts that differ early and then continue alike, when it was last reported.",
    "tenant",
)
REPLICAS = _g.gauge(
    "llmops_replicas",
    "Replicas by what this gateway believes of them: starting, spare, ready, draining, suspect, gone.",
    "model",
    "state",
)
SERVERS = _g.gauge("llmops_server_reached", "Workers of this gateway that reach the Triton server.", "server")
LAG = _g.histogram("llmops_event_loop_lag_seconds", "How late the event loop was with a timer of 40 ms.", "loop")
HELD = _g.counter(
    "llmops_event_loop_held_seconds_total",
    "Time in which the gateway's own work kept the event loop from anything else for over 50 ms.",
)
MEMORY = _g.gauge("process_resident_memory_bytes", "Resident memory of this process, in bytes.")

# What is told by who has it: the room of usage, control, or an evaluation in a file for the node exporter.
ROOMS = Table()
USAGE_LAG = ROOMS.gauge(
    "llmops_usage_lag_seconds", "Age of the oldest usage event that the ledger does not have; 0 without one."
)
_SPENT = "since the 1st of the month (UTC), by the ledger"
SPENT = ROOMS.gauge(
    "llmops_spent_dollars",
    f"What tenants used {_SPENT}, in dollars. Control has it; beyond the 20 that spend most they share `other`.",
    "tenant",
)
SPENT_TOKENS = ROOMS.gauge(
    "llmops_spent_tokens", f"The same in tokens: input (not cached), cached, output; {_SPENT}.", "tenant", "kind"
)
SPENT_ON = ROOMS.gauge("llmops_spent_on_model_dollars", f"What was used of each model {_SPENT}, in dollars.", "model")
BUDGET_USED = ROOMS.gauge(
    "llmops_budget_used_ratio", "Share of a tenant's budget that its present period has used.", "tenant"
)
PARKED = ROOMS.gauge(
    "llmops_usage_events_parked",
    "Usage events that are on no bill, by the reason (`llmops usage parked` lists them). Control has it.",
    "reason",
)
TOLD = ROOMS.counter(
    "llmops_told_total",
    "Requests told of in traces or the access log (`signal`: trace, access_log), sent or dropped for want of room or a "
    "receiver.",
    "signal",
    "result",
)
EVAL_SCORE = ROOMS.gauge(
    "llm_eval_score", "What an evaluation of the model says now; higher is better.", "model", "eval"
)
EVAL_BASELINE = ROOMS.gauge("llm_eval_baseline", "What it said before the model was changed.", "model", "eval")
