"""The numbers of `llmops top`, from metrics pages and replica states (docs/metrics.md)."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmops.cli.monitor.exposition import LabelSums, MetricsWindow, quantile
from llmops.contract import ENGINE_SUFFIX
from llmops.gateway.telemetry import metric_definitions

# outcomes of an answer that are failures
UNHEALTHY_STATES = ("failed", "shed", "aborted")


@dataclass(frozen=True)
class PolledGateway:
    """A polled gateway: its recent counts, or the `problem` why there are none.

    `states`: the replica states of each of its workers, from GET /replicas.
    """

    url: str
    recent: MetricsWindow
    problem: str = ""
    states: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class ReplicaRow:
    """A model on one server.

    `doubts`: gateway workers that report a different state. `own`: streams of the reporting
    gateways. Times are in milliseconds.
    """

    model: str
    replica: str
    state: str = ""
    doubts: int = 0
    last_update_seconds_ago: float | None = None
    running: float | None = None
    waiting: float | None = None
    own: float | None = None
    kv_use: float | None = None
    step_ms: float | None = None
    prefill_tokens_per_s: float | None = None
    problem: str = ""
    source: str = ""


@dataclass(frozen=True)
class ModelRow:
    """A model at all gateways.

    Shares are fractions of 1, rates per second. None: not known, such as goodput without traffic.

    `kv_use` is that of the fullest ready replica, `batch` the mean of the ready replicas.
    """

    model: str
    ready: int | None = None
    replicas: int | None = None
    requests_per_s: float | None = None
    running: float = 0.0
    waiting: Mapping[str, float] = field(default_factory=dict)
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    tpot_p50_ms: float | None = None
    tpot_p95_ms: float | None = None
    goodput: float | None = None
    tokens_in_per_s: float | None = None
    tokens_out_per_s: float | None = None
    prefix_hit_rate: float | None = None
    kv_use: float | None = None
    batch: float | None = None
    failed_per_s: float | None = None
    shed_per_s: float | None = None
    aborted_per_s: float | None = None


@dataclass(frozen=True)
class GatewayRow:
    """A gateway.

    `refused_per_s` is by HTTP status. `loop_held`: share of the time in which the gateway's own
    work delayed streams. `unreached`: servers that the gateway cannot reach, with the reasons.
    """

    url: str
    problem: str = ""
    requests_per_s: float | None = None
    refused_per_s: Mapping[str, float] = field(default_factory=dict)
    streams: float | None = None
    loop_held: float | None = None
    memory_bytes: float | None = None
    unreached: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FleetSnapshot:
    """A snapshot of a fleet. `seconds` is the length of the window of rates, 0 after a single poll."""

    seconds: float
    models: Sequence[ModelRow]
    replicas: Sequence[ReplicaRow]
    gateways: Sequence[GatewayRow]


def make_snapshot(gateways: Sequence[PolledGateway], engines: Mapping[str, MetricsWindow]) -> FleetSnapshot:
    """Return a snapshot of the fleet from the latest polls.

    Args:
        gateways: The gateways with their latest metrics and replica states.
        engines: Triton's metrics pages by HOST:PORT, for replicas that no gateway reports.
    """
    there = [one.recent for one in gateways if not one.problem]
    replicas = rows_from_gateways(gateways) or rows_from_triton(engines)
    counted = _ModelCounters(there)
    return FleetSnapshot(
        max((one.seconds for one in there), default=0.0),
        [counted.row(name, [one for one in replicas if one.model == name]) for name in counted.models(replicas)],
        replicas,
        [_gateway(one) for one in gateways],
    )


class _ModelCounters:
    """Sums of counters over gateways, by model."""

    def __init__(self, gateways: Sequence[MetricsWindow]) -> None:
        self._rates = {
            name: self._sums(gateways, name, name.labels, rate=True)
            for name in (
                metric_definitions.ANSWERS,
                metric_definitions.PROMPT_TOKENS,
                metric_definitions.COMPLETION_TOKENS,
                metric_definitions.PREFIX_CACHED_TOKENS,
                metric_definitions.PREFIX_LOOKUP_TOKENS,
            )
        }
        # rates of buckets, because gateways may have been watched for different times
        self._buckets = {
            name: self._sums(gateways, name, ("model", "le"), "_bucket", rate=True)
            for name in (metric_definitions.TTFT, metric_definitions.TPOT)
        }
        self._waiting = self._sums(gateways, metric_definitions.QUEUE_DEPTH, ("model", "priority"))
        self._active = self._sums(gateways, metric_definitions.ACTIVE_STREAMS, ("model",))
        self._states: dict[str, dict[str, int]] = defaultdict(dict)
        for one in gateways:
            self._see_states(one)
        self._rated = any(one.seconds > 0 for one in gateways)

    def models(self, replicas: Iterable[ReplicaRow]) -> list[str]:
        """Return the models that any gateway names."""
        found = {model for (model,) in self._active.values} | {model for model, _ in self._waiting.values}
        return sorted(found | set(self._states) | {one.model for one in replicas})

    def row(self, model: str, replicas: Sequence[ReplicaRow]) -> ModelRow:
        outcomes, states = self._rates[metric_definitions.ANSWERS].of(model), self._states.get(model)
        troubles = {f"{one}_per_s": outcomes.get(one, 0.0) if self._rated else None for one in UNHEALTHY_STATES}
        judged = sum(rate for outcome, rate in outcomes.items() if outcome != "aborted")
        looked_up = self._rate(metric_definitions.PREFIX_LOOKUP_TOKENS, model)
        ready = [one for one in replicas if one.state in ("ready", "")]
        ttft, tpot = (self._buckets[name].of(model) for name in (metric_definitions.TTFT, metric_definitions.TPOT))
        return ModelRow(
            model,
            ready=None if states is None else states.get("ready", 0),
            replicas=None if states is None else sum(states.values()),
            requests_per_s=sum(outcomes.values()) if self._rated else None,
            running=self._active.values.get((model,), 0.0),
            waiting=self._waiting.of(model),
            ttft_p50_s=quantile(0.5, ttft),
            ttft_p95_s=quantile(0.95, ttft),
            tpot_p50_ms=quantile(0.5, tpot),
            tpot_p95_ms=quantile(0.95, tpot),
            goodput=outcomes.get("good", 0.0) / judged if judged else None,
            tokens_in_per_s=self._rate(metric_definitions.PROMPT_TOKENS, model),
            tokens_out_per_s=self._rate(metric_definitions.COMPLETION_TOKENS, model),
            prefix_hit_rate=(self._rate(metric_definitions.PREFIX_CACHED_TOKENS, model) or 0.0) / looked_up
            if looked_up
            else None,
            kv_use=max((one.kv_use for one in ready if one.kv_use is not None), default=None),
            batch=_mean([one.running for one in ready if one.running is not None]),
            **troubles,
        )

    def _rate(self, name: metric_definitions.MetricDefinition, model: str) -> float | None:
        return self._rates[name].values.get((model,), 0.0) if self._rated else None

    def _see_states(self, gateway: MetricsWindow) -> None:
        """Count the states of replicas.

        Gateways share replicas, so the highest count of a state is used.
        """
        sums = LabelSums("model", "state")
        if gateway.last is not None:
            sums.add(gateway.last.series(metric_definitions.REPLICAS.name))
        for (model, state), count in sums.values.items():
            if count or state == "ready":
                known = self._states[model]
                known[state] = max(known.get(state, 0), int(count))

    @staticmethod
    def _sums(
        gateways: Sequence[MetricsWindow],
        name: metric_definitions.MetricDefinition,
        labels: Sequence[str],
        part: str = "",
        *,
        rate: bool = False,
    ) -> LabelSums:
        sums = LabelSums(*labels)
        for one in gateways:
            if rate and one.seconds > 0:
                sums.add(one.increases(name.name + part), 1 / one.seconds)
            elif not rate and one.last is not None:
                sums.add(one.last.series(name.name + part))
        return sums


def rows_from_gateways(gateways: Sequence[PolledGateway]) -> list[ReplicaRow]:
    """Return a row per replica, from the worker with the most recent update."""
    lines: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for gateway in gateways:
        for worker in gateway.states:
            for model, some in worker["models"].items():
                for line in some:
                    lines[model, line["replica"]].append(line)
    return [_replica(model, some) for (model, _), some in sorted(lines.items())]


def _replica(model: str, lines: Sequence[Mapping[str, Any]]) -> ReplicaRow:
    def silence(line: Mapping[str, Any]) -> float:
        heard = line.get("last_update_seconds_ago")
        return float("inf") if heard is None else float(heard)

    last = min(lines, key=silence)
    blocks, rate, step = (last.get(name) for name in ("kv_blocks", "prefill_tokens_per_second", "step_ms"))
    return ReplicaRow(
        model,
        last["replica"],
        last["state"],
        sum(line["state"] != last["state"] for line in lines),
        last.get("last_update_seconds_ago"),
        last.get("running"),
        last.get("waiting"),
        _sum(line.get("own") for line in lines),
        1 - last["kv_blocks_free"] / blocks if blocks else None,
        step or None,
        rate or None,
        last.get("problem", ""),
        last.get("source", ""),
    )


def rows_from_triton(engines: Mapping[str, MetricsWindow]) -> list[ReplicaRow]:
    """Return a row per replica, from Triton's own metrics."""
    rows = []
    for server, recent in sorted(engines.items()):
        if recent.last is None:
            continue
        requests, blocks = LabelSums("model", "request_type"), LabelSums("model", "kv_cache_block_type")
        requests.add(recent.last.series(metric_definitions.ENGINE_REQUESTS))
        blocks.add(recent.last.series(metric_definitions.ENGINE_BLOCKS))
        for engine in sorted({model for model, _ in requests.values}):
            of, memory = requests.of(engine), blocks.of(engine)
            rows.append(
                ReplicaRow(
                    engine.removesuffix(ENGINE_SUFFIX),
                    server,
                    running=of.get("scheduled", of.get("active")),
                    waiting=of.get("waiting"),
                    kv_use=memory.get("fraction"),
                )
            )
    return rows


def _gateway(asked: PolledGateway) -> GatewayRow:
    recent = asked.recent
    if asked.problem or recent.last is None:
        return GatewayRow(asked.url, asked.problem)
    unreached = {server: why for worker in asked.states for server, why in worker.get("unreached", {}).items()}
    gauges = {
        name: sum(value for _, value in recent.last.series(name.name))
        for name in (metric_definitions.ACTIVE_STREAMS, metric_definitions.MEMORY)
    }
    if not recent.seconds:
        return GatewayRow(
            asked.url,
            streams=gauges[metric_definitions.ACTIVE_STREAMS],
            memory_bytes=gauges[metric_definitions.MEMORY],
            unreached=unreached,
        )
    by_status = LabelSums("status")
    by_status.add(recent.increases(metric_definitions.REQUESTS.name), 1 / recent.seconds)
    held = sum(value for _, value in recent.increases(metric_definitions.EVENT_LOOP_BLOCKED.name)) / recent.seconds
    statuses = by_status.of()
    return GatewayRow(
        asked.url,
        "",
        sum(statuses.values()),
        {status: rate for status, rate in sorted(statuses.items()) if status >= "400" and rate},
        gauges[metric_definitions.ACTIVE_STREAMS],
        held,
        gauges[metric_definitions.MEMORY],
        unreached,
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
