"""Format the figures and the rows of tables that the terminal and the HTML page share."""

from llmops.build.plan.gpu_specs import GB
from llmops.build.plan.memory.memory_budget import MemoryBudget
from llmops.build.plan.search.candidate import Candidate
from llmops.build.plan.search.layout_search import PlanResult
from llmops.build.plan.search.plan_summary import batch_limit

#: Number of layouts that a ranking shows. On the page, the other layouts are in a closed `details`
#: element.
LISTED_CANDIDATES = 8


def gigabytes(bytes_: float) -> str:
    """Return a size, given in bytes, as text in MB or GB."""
    return f"{bytes_ / GB:.1f} GB" if bytes_ >= 0.05 * GB else f"{bytes_ / 1e6:.0f} MB"


def milliseconds(seconds: float) -> str:
    """Return a duration, given in seconds, as text in milliseconds."""
    return (
        f"{seconds:.1f} s"
        if seconds >= 10
        else f"{1e3 * seconds:,.0f} ms"
        if seconds >= 0.1
        else f"{1e3 * seconds:.1f} ms"
    )


def dollars(amount: float) -> str:
    """Return a price, given in dollars, as text."""
    return f"${amount:,.0f}" if amount >= 1000 else f"${amount:,.2f}" if amount >= 0.01 else f"${amount:.4f}"


def title(plan: PlanResult) -> str:
    """Return the model's name and the request in one line."""
    return f"{plan.request.name} · {request_summary(plan)}"


def request_summary(plan: PlanResult) -> str:
    """Return the request in one line, without the model's name."""
    request = plan.request
    load = request.workload
    parts = [f"{load.isl} + {load.osl} tokens"]
    if load.qps:
        parts.append(f"{load.qps:g} requests/s")
    parts += [f"{name} {'≥' if name == 'availability' else '≤'} {limit}" for name, limit in _targets(plan)]
    if load.prefix_hit:
        parts.append(f"prefix hits {load.prefix_hit:.0%}")
    if load.draft_tokens:
        parts.append(f"{load.draft_tokens} draft tokens accepted at {load.acceptance:g}")
    if not load.chunked_prefill:
        parts.append("no chunked prefill")
    return f"{request.precision.label} weights, {request.kv} KV · {', '.join(parts)}"


def _targets(plan: PlanResult) -> list[tuple[str, str]]:
    """Return the objectives as pairs of texts, such as ("TTFT p95", "500 ms")."""
    targets = plan.request.workload.targets.items()
    found = [(name.upper().replace("_P", " p"), milliseconds(limit)) for name, limit in targets]
    share = plan.request.workload.availability
    return found if share is None else [*found, ("availability", f"{100 * share:g} %")]


def _latency(mean: float, p95: float, p99: float) -> str:
    return f"{milliseconds(mean)} mean, {milliseconds(p95)} p95, {milliseconds(p99)} p99"


def recommendation(plan: PlanResult) -> str:
    """Return the recommendation in one sentence."""
    best, load = plan.best, plan.request.workload
    rate = load.qps or best.capacity
    fleet = f"{best.gpus} {best.gpu.name} GPU{'s' * (best.gpus > 1)}"
    spare = f", {best.spares} of them spare" if best.spares else ""
    layout = f"{best.replicas} replica{'s' * (best.replicas > 1)} of {best.name}{spare}"
    limits = [f"{name} {limit}" for name, limit in _targets(plan)]
    within = f" within {' and '.join(limits)}" if limits else ""
    return (
        f"{fleet} ({layout}) serve {rate:,.3g} requests/s of {load.isl:,} + {load.osl:,} tokens{within} for "
        f"{dollars(best.cost.hourly)} an hour."
    )


def key_figures(plan: PlanResult) -> list[tuple[str, str]]:
    """Return the figures that most readers look for, as pairs of a name and a text."""
    best = plan.best
    return [
        (f"GPUs, {best.gpu.name}", str(best.gpus)),
        ("Cost", f"{dollars(best.cost.hourly)}/h"),
        ("$/M output tokens", dollars(best.cost.output_per_million)),
        ("TTFT p95", milliseconds(best.point.ttft_p95)),
        ("TPOT p95", milliseconds(best.point.tpot_p95)),
        ("Highest rate", f"{best.capacity:,.1f} req/s"),
    ]


def memory_rows(candidate: Candidate) -> list[tuple[str, str, int]]:
    """Return each part of the fullest GPU's memory, as name, size as text, and bytes."""
    memory: MemoryBudget = candidate.memory
    rows = [(f"weights: {part}", bytes_) for part, bytes_ in memory.weights.items() if bytes_]
    rows += [
        ("activations", memory.activations),
        ("CUDA graphs", memory.cuda_graphs),
        ("communication", memory.communication),
        ("runtime", memory.runtime),
        *([("recurrent states", memory.states)] if memory.states else []),
        ("KV cache", memory.kv_cache),
        ("left free", memory.left),
    ]
    return [(name, gigabytes(bytes_), bytes_) for name, bytes_ in rows]


def best_layout_rows(plan: PlanResult) -> list[tuple[str, str]]:
    """Return the facts about the best layout, as pairs of a name and a text."""
    best, load = plan.best, plan.request.workload
    point, cost = best.point, best.cost
    answer_rate = f"{best.capacity * load.osl:,.0f} output tokens/s"
    slots = f"without paging {best.contiguous:,} slots of {best.limits.max_seq_len:,}"
    kept = " keep the targets" if load.has_targets else ""
    lines = [
        ("layout", f"{best.name}, {best.replicas} replica{'s' * (best.replicas > 1)}"),
        ("GPUs", f"{best.gpus} x {best.gpu.name} on {best.nodes} node{'s' * (best.nodes > 1)}"),
        ("TTFT", _latency(point.ttft, point.ttft_p95, point.ttft_p99)),
        ("TPOT", _latency(point.tpot, point.tpot_p95, point.tpot_p99)),
        ("longest pause", f"{milliseconds(point.pause)} between two tokens, while a prompt is read"),
        ("output tokens/s", f"{point.per_gpu:,.0f} per GPU, {point.per_user:,.0f} per user"),
        ("highest rate", f"{best.capacity:.2f} requests/s ({answer_rate}){kept}"),
        ("KV cache", f"{best.kv_token:,} bytes per token and GPU"),
        ("sequences", f"{best.paged:,} of {load.length:,} tokens fit per replica; {slots}"),
        ("cost", f"{dollars(cost.hourly)}/h, {dollars(cost.monthly)}/month at {dollars(best.gpu.price)} per GPU-hour"),
        ("per million tokens", f"{dollars(cost.input_per_million)} input, {dollars(cost.output_per_million)} output"),
    ]
    if plan.request.api:
        lines.append(("against the API", break_even(best)))
    return [*lines, ("build limits", build_limits(best))]


def build_limits(best: Candidate) -> str:
    """Return the limits of the planned engine, in one line."""
    limits = best.limits
    return (
        f"max_batch_size {batch_limit(best)}, max_num_tokens {limits.max_num_tokens}, max_seq_len "
        f"{limits.max_seq_len}, KV fraction {limits.kv_fraction:g}"
    )


def disaggregated_saving(plan: PlanResult) -> str | None:
    """Return a sentence about the saving by separate prefill and decode workers, or None."""
    other, best = plan.cheaper_disaggregated, plan.best
    if other is None:
        return None
    rate = bool(plan.request.workload.qps)
    save = 1 - (other.cost.hourly / best.cost.hourly if rate else other.cost.request / best.cost.request)
    cost = f"{dollars(other.cost.hourly)}/h" if rate else f"{dollars(other.cost.request)} per request"
    return (
        f"Prefill and decode on separate workers would cost {save:.0%} less: {other.name} on {other.gpus} x "
        f"{other.gpu.name}, {cost}, TTFT p95 {milliseconds(other.point.ttft_p95)}, TPOT p95 "
        f"{milliseconds(other.point.tpot_p95)}. llmops does not build or deploy this."
    )


def break_even(best: Candidate) -> str:
    """Return the volume from which the fleet is cheaper than the API, as text."""
    if best.cost.break_even_rate is None:
        return (
            f"never cheaper: even at full load, the fleet costs more than the API ({dollars(best.cost.request)} per "
            "request)"
        )
    tokens = (best.cost.break_even_tokens_per_day or 0) / 1e6
    return f"cheaper above {best.cost.break_even_rate:.2f} requests/s ({tokens:,.0f} million tokens a day)"
