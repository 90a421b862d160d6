"""The name, labels and meaning of every metric of the gateway.

docs/metrics.md is generated from this table. Dashboards and alerts of operators use the metrics
`llm_*` and `gpu_*`; the metrics `llmops_*` describe the gateway itself.

Every label has a bounded set of values: served models, existing routes, a limited number of tiers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["counter", "gauge", "histogram"]

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
# gauges that NVIDIA exports for an engine model on Triton's metrics page; the engine models of this
# project export the same gauges
ENGINE_REQUESTS, ENGINE_BLOCKS = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
# buckets are narrow around the usual objectives
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0)
TPOT_BUCKETS = (1.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 25.0, 30.0, 40.0, 50.0, 75.0, 100.0, 150.0, 250.0, 500.0, 1000.0)


@dataclass(frozen=True)
class MetricDefinition:
    """The definition of one metric family. `name` includes the suffix `_total` of a counter."""

    name: str
    kind: MetricKind
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS_BUCKETS


class MetricTable(list[MetricDefinition]):
    """The metric definitions, in the order of /metrics and of docs/metrics.md."""

    def counter(self, name: str, meaning: str, *labels: str) -> MetricDefinition:
        return self._add(MetricDefinition(name, "counter", meaning, labels))

    def gauge(self, name: str, meaning: str, *labels: str) -> MetricDefinition:
        return self._add(MetricDefinition(name, "gauge", meaning, labels))

    def histogram(
        self, name: str, meaning: str, *labels: str, buckets: tuple[float, ...] = SECONDS_BUCKETS
    ) -> MetricDefinition:
        return self._add(MetricDefinition(name, "histogram", meaning, labels, buckets))

    def _add(self, name: MetricDefinition) -> MetricDefinition:
        self.append(name)
        return name


GATEWAY_METRICS = MetricTable()
_g = GATEWAY_METRICS

TTFT = _g.histogram(
    "llm_ttft_seconds", "Time from a request's arrival to its first token.", "model", buckets=TTFT_BUCKETS
)
TPOT = _g.histogram("llm_tpot_ms", "Mean time per token after the first, per answer.", "model", buckets=TPOT_BUCKETS)
QUEUE_DEPTH = _g.gauge(
    "llm_queue_depth", "Requests that wait for their first token; `priority` is the caller's tier.", "model", "priority"
)
ANSWERS = _g.counter(
    "llmops_answers_total",
    "Finished answers, by goodput outcome.",
    "model",
    "outcome",
)
SLO_REQUESTS = _g.counter(
    "llmops_slo_requests_total",
    "Finished requests by objective (`ttft_p99`, `availability`) and result: met, missed.",
    "model",
    "tier",
    "objective",
    "result",
)
SLO_TARGET = _g.gauge(
    "llmops_slo_target_ratio", "Share of requests that must meet the objective.", "model", "tier", "objective"
)
PROMPT_TOKENS = _g.counter("llmops_prompt_tokens_total", "Tokens of the prompts.", "model")
PREFIX_LOOKUP_TOKENS = _g.counter(
    "llmops_prefix_lookup_tokens_total",
    "Prompt tokens with a reported cache state.",
    "model",
)
PREFIX_CACHED_TOKENS = _g.counter(
    "llmops_prefix_cached_tokens_total", "Prompt tokens found in the prefix cache.", "model"
)
COMPLETION_TOKENS = _g.counter("llmops_completion_tokens_total", "Tokens generated for answers.", "model")
CANCELLED_REQUESTS = _g.counter(
    "llmops_cancelled_requests_total", "Requests cancelled by a client's disconnect.", "model"
)
ACTIVE_STREAMS = _g.gauge("llmops_active_streams", "Answers in progress.", "model")
ITL = _g.histogram("llmops_inter_token_latency_seconds", "Time between two messages of an answer, per token.", "model")
DURATION = _g.histogram("llmops_request_duration_seconds", "Time from a request's arrival to its last token.", "model")
#: Metrics that each model has from its first request on: all that are defined above this line.
MODEL_METRICS = tuple(GATEWAY_METRICS)
REQUESTS = _g.counter("llmops_requests_total", "Finished requests.", "route", "status")
OVERHEAD = _g.histogram("llmops_overhead_seconds", "The gateway's own time until the answer begins (`total`).", "stage")
STAGES = _g.histogram(
    "llmops_stage_seconds",
    "Time until the answer begins (a stream's first bytes, else all of it), by stage: parse, queue (for a "
    "text thread), template, tokenise, submit (with the wait for a replica), upstream, detokenise, write.",
    "stage",
)
FAILOVERS = _g.counter(
    "llmops_failovers_total",
    "Answers that moved to another replica: lost, failed, refused, drain, suspect, preempted; or to another gateway: "
    "gateway.",
    "reason",
)
IGNORED_FIELDS = _g.counter("llmops_ignored_fields_total", "Request fields accepted and ignored.", "field")
SAFETY_FINDINGS = _g.counter(
    "llmops_safety_findings_total",
    "Texts in which a safety filter found something: prompt or answer, and what was done (refused, hold, cut, "
    "observe).",
    "filter",
    "side",
    "action",
)
SAFETY_FAILURES = _g.counter("llmops_safety_failures_total", "Texts that a safety filter could not judge.", "filter")
SAFETY_SECONDS = _g.histogram(
    "llmops_safety_seconds", "Time that a safety filter took for a prompt or a window of an answer.", "filter"
)
REFUSED_CONNECTIONS = _g.counter(
    "llmops_refused_connections_total",
    "Connections closed at a limit: client (answer not read), connections, header, header_bytes, invalid, pipeline "
    "(too many requests queued), room (idle, replaced by a new one), unread (unread answers of all clients too large).",
    "reason",
)
MISROUTED = _g.counter(
    "llmops_misrouted_total", "Answers from another engine than the replica's metadata announces; should be 0.", "model"
)
ROUTED = _g.counter(
    "llmops_routed_requests_total",
    "Requests to an alias that chooses a model, by reason: conversation, quality, tier, tools, schema, length, code, "
    "head, default, degraded, fallback.",
    "alias",
    "model",
    "reason",
)
DEGRADED_LEVEL = _g.gauge(
    "llmops_degraded_level",
    "Level of degraded mode: 1 shorter answers, 2 the small model, 3 shorter prompts of lower tiers, 4 no lower tiers.",
    "model",
)
DEGRADED_REQUESTS = _g.counter(
    "llmops_degraded_requests_total",
    "Requests that degraded mode changed: max_tokens, small_model; or rejected: prompt_tokens, shed.",
    "model",
    "effect",
)
QUALITY_SCORE = _g.gauge(
    "llm_quality_score", "Share of the golden prompts that a version answers correctly.", "model", "version"
)
CORRUPTED_REPLICAS = _g.counter(
    "llmops_corrupted_replicas_total",
    "Replicas drained because their greedy answers differed from their version's other replicas.",
    "model",
    "replica",
)
REPLICAS = _g.gauge(
    "llmops_replicas",
    "Replicas by state in this gateway's view: starting, ready, draining, suspect, gone.",
    "model",
    "state",
)
REPLICA_RESTARTS = _g.counter(
    "llmops_replica_restarts_total", "Restarts of engines that this gateway noticed.", "model", "replica"
)
REPLICA_INFO = _g.gauge(
    "llmops_replica_info",
    "1 for each replica; source: reported by it, or measured by this gateway (NVIDIA's C++ backend).",
    "model",
    "replica",
    "source",
)
SERVER_REACHABLE = _g.gauge(
    "llmops_server_reachable", "Workers of this gateway that reach the Triton server.", "server"
)
EVENT_LOOP_LAG = _g.histogram("llmops_event_loop_lag_seconds", "Lateness of a 40 ms timer in the event loop.", "loop")
EVENT_LOOP_BLOCKED = _g.counter(
    "llmops_event_loop_blocked_seconds_total",
    "Time in which the gateway's own work blocked the event loop for over 50 ms.",
)
MEMORY = _g.gauge("process_resident_memory_bytes", "Resident memory of this process.")

#: Metrics of some processes only: gateways with a usage outbox, `llmops control`, and evaluations
#: (through text files of the node exporter).
OPTIONAL_METRICS = MetricTable()
USAGE_LAG = OPTIONAL_METRICS.gauge(
    "llmops_usage_lag_seconds", "Age of the oldest usage event that is not in the ledger, or 0."
)
_SPENT = "in this month (UTC), from the ledger"
SPENT = OPTIONAL_METRICS.gauge(
    "llmops_spent_dollars",
    f"Dollars used {_SPENT}. From control; tenants beyond the top 20 share `other`.",
    "tenant",
)
SPENT_TOKENS = OPTIONAL_METRICS.gauge(
    "llmops_spent_tokens", f"Tokens used {_SPENT}: input (not cached), cached, output.", "tenant", "kind"
)
SPENT_BY_MODEL = OPTIONAL_METRICS.gauge("llmops_model_spent_dollars", f"Dollars used {_SPENT}.", "model")
BUDGET_USED = OPTIONAL_METRICS.gauge(
    "llmops_budget_used_ratio", "Share of a tenant's budget used in its current period.", "tenant"
)
PARKED_EVENTS = OPTIONAL_METRICS.gauge(
    "llmops_usage_dead_letters",
    "Usage events that could not be billed (`llmops usage dead-letters` lists them). From control.",
    "reason",
)
TELEMETRY_EXPORTS = OPTIONAL_METRICS.counter(
    "llmops_telemetry_exports_total",
    "Requests exported to traces or the access log (`signal`: trace, access_log): sent, or dropped without space or "
    "receiver.",
    "signal",
    "result",
)
EVAL_SCORE = OPTIONAL_METRICS.gauge(
    "llm_eval_score", "Current score of an evaluation; higher is better.", "model", "eval"
)
EVAL_BASELINE = OPTIONAL_METRICS.gauge("llm_eval_baseline", "Score before the model was changed.", "model", "eval")
