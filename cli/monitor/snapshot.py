"""The numbers of `llmops top`, from metrics pages and replica states (docs/metrics.md)."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from llmops.cli.monitor.exposition import MAX_LABEL_LENGTH, LabelSums, MetricsWindow, quantile
from llmops.contract import ENGINE_SUFFIX
from llmops.gateway.telemetry import metric_definitions
from llmops.untrusted_text import escape_unsafe

# outcomes of a request that count as failures
UNHEALTHY_STATES = ("failed", "shed", "aborted")


_Name = Annotated[str, AfterValidator(lambda text: escape_unsafe(text, MAX_LABEL_LENGTH))]
_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)] | None


class ReplicaState(BaseModel):
    """The state of a replica, as a gateway worker reports it."""

    replica: _Name
    state: _Name
    source: _Name = ""
    last_update_seconds_ago: _Number = None
    running: _Number = None
    waiting: _Number = None
    own: _Number = None
    kv_blocks: _Number = None
    kv_blocks_free: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0
    step_ms: _Number = None
    prefill_tokens_per_second: _Number = None
    problem: _Name = ""


class WorkerStates(BaseModel):
    """The replica states of a gateway worker, by model."""

    gateway: _Name = ""
    models: dict[_Name, list[ReplicaState]]
    unreached: dict[_Name, _Name] = {}


@dataclass(frozen=True)
class PolledGateway:
    """A polled gateway: its recent counts, or the `problem` that prevented them.

    `states` has the replica states of each gateway worker, from GET /replicas.
    """

    url: str
    recent: MetricsWindow
    problem: str = ""
    states: Sequence[WorkerStates] = ()


@dataclass(frozen=True)
class ReplicaRow:
    """A model on one server.

    `doubts` is the number of gateway workers that report a different state. `own` is the number of
    streams of the reporting gateways. `kv_use` is the used share of the KV cache, from 0 to 1.
    Other units are part of the names.
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

    Shares are fractions of 1, and rates are per second. None stands for an unknown value, such as
    goodput without traffic. `kv_use` is the value of the fullest ready replica, and `batch` the
    mean over the ready replicas.
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

    `refused_per_s` has the rate of rejected requests by HTTP status. `loop_held` is the share of
    the time in which the gateway's own work delayed streams. `unreached` has the servers that the
    gateway cannot reach, with the reasons.
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
    """A snapshot of a fleet. `seconds` is the length of the rates' window, 0 after one poll."""

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
    """The sums of counters over all gateways, by model."""

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
        # sum rates of buckets, not counts, because gateways may have been watched for different
        # times
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
    lines: dict[tuple[str, str], list[ReplicaState]] = defaultdict(list)
    for gateway in gateways:
        for worker in gateway.states:
            for model, some in worker.models.items():
                for line in some:
                    lines[model, line.replica].append(line)
    return [_replica(model, some) for (model, _), some in sorted(lines.items())]


def _replica(model: str, lines: Sequence[ReplicaState]) -> ReplicaRow:
    last = min(lines, key=lambda line: (line.last_update_seconds_ago is None, line.last_update_seconds_ago))
    return ReplicaRow(
        model,
        last.replica,
        last.state,
        sum(line.state != last.state for line in lines),
        last.last_update_seconds_ago,
        last.running,
        last.waiting,
        _sum(line.own for line in lines),
        1 - last.kv_blocks_free / last.kv_blocks if last.kv_blocks else None,
        last.step_ms or None,
        last.prefill_tokens_per_second or None,
        last.problem,
        last.source,
    )


def rows_from_triton(engines: Mapping[str, MetricsWindow]) -> list[ReplicaRow]:
    """Return a row per replica, from the metrics of Triton."""
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
    recent, page, row = asked.recent, asked.recent.last, GatewayRow(asked.url, asked.problem)
    if asked.problem or page is None:
        return row
    gauges = (metric_definitions.ACTIVE_STREAMS, metric_definitions.MEMORY)
    streams, memory = (sum(value for _, value in page.series(gauge.name)) for gauge in gauges)
    unreached = {server: why for worker in asked.states for server, why in worker.unreached.items()}
    row = replace(row, streams=streams, memory_bytes=memory, unreached=unreached)
    if not recent.seconds:
        return row
    by_status = LabelSums("status")
    by_status.add(recent.increases(metric_definitions.REQUESTS.name), 1 / recent.seconds)
    rates = by_status.of()
    return replace(
        row,
        requests_per_s=sum(rates.values()),
        refused_per_s={status: rate for status, rate in sorted(rates.items()) if status >= "400" and rate},
        loop_held=sum(held for _, held in recent.increases(metric_definitions.EVENT_LOOP_BLOCKED.name))
        / recent.seconds,
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
