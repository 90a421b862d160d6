"""The plan as one HTML page.

The answer comes first, then its reasons, the alternatives and the rejected layouts.
"""

import time
from html import escape

from llmops.build.plan.report import figures
from llmops.build.plan.report.curves import cost_by_rate, frontiers
from llmops.build.plan.search.candidate import Candidate
from llmops.build.plan.search.layout_search import PlanResult
from llmops.build.plan.search.plan_summary import accuracy_warning
from llmops.html_pages.elements import collapsible, data_table, key_figures, key_value_table, note
from llmops.html_pages.elements import render_page as whole
from llmops.html_pages.plots import Plot, Series, stacked_bar

_HEAD = [
    "Layout", "GPU", "GPUs", "$/h", "$/M in", "$/M out", "TTFT p95", "TPOT p95", "max req/s", "tok/s/GPU", "tok/s/user",
]  # fmt: skip


def render_page(plan: PlanResult) -> str:
    """Return the plan as an HTML document."""
    name, best = plan.request.name, plan.best
    body = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="soft">llmops plan · {escape(figures.request_summary(plan))} · '
        f"{time.strftime('%Y-%m-%d', time.gmtime())}</p>",
        f'<p class="answer">{escape(figures.recommendation(plan))}</p>',
        key_figures(figures.key_figures(plan)),
        *(note(warning) for warning in (figures.disaggregated_saving(plan), accuracy_warning(plan)) if warning),
        f"<h2>Memory of one GPU</h2>{_memory(best)}",
        f'<h2>Plots</h2><div class="plots">{_pareto(plan)}{_cost(plan)}</div>',
        f"<h2>Layouts that hold the targets, by cost</h2>{_ranking(plan)}",
        f"<h2>The first in full</h2>{key_value_table(figures.best_layout_rows(plan), words=True)}",
        _rejected(plan),
        f"<h2>Sources of the times</h2>{key_value_table(plan.timing.items(), words=True)}",
    ]
    return whole(f"llmops plan · {name}", body)


def _memory(best: Candidate) -> str:
    """Return a bar of the largest parts of the memory, and a table of all parts."""
    memory, weights = best.memory, best.memory.weights
    large = weights.get("mlp", 0) + weights.get("experts", 0)
    attention = weights.get("attention", 0)
    parts = [
        ("KV cache", memory.kv_cache),
        ("weights of experts" if weights.get("experts") else "weights of MLPs", large),
        ("weights of attention", attention),
        ("other weights", memory.weight_bytes - large - attention),
        ("activations", memory.activations),
        ("runtime and graphs", memory.runtime + memory.cuda_graphs + memory.communication + memory.states),
        ("left free", memory.left),
    ]
    title = f"{figures.gigabytes(memory.total)} of each {best.gpu.name}, {best.name}"
    rows = ((name, size) for name, size, _ in figures.memory_rows(best))
    bar = stacked_bar(title, [(name, size, figures.gigabytes(size)) for name, size in parts])
    return bar + collapsible("every part", key_value_table(rows))


def _pareto(plan: PlanResult) -> str:
    series = []
    for gpu, line in frontiers(plan.curves).items():
        points = sorted((point.per_user, point.per_gpu, layout) for point, layout in line)
        series.append(Series(gpu, [(x, y) for x, y, _ in points], labels=tuple(layout for *_, layout in points)))
    user = plan.best.point.per_user
    return Plot(
        "Throughput against speed: the layouts that no other layout beats in both",
        "tokens/s per user",
        "tokens/s per GPU",
        series,
        marks=[(user, "recommended")],
    ).svg()


def _cost(plan: PlanResult) -> str:
    rate = plan.request.workload.qps
    lines = cost_by_rate(plan)
    series = [Series(name, points) for name, points in lines.items()]
    marks = [(rate, "asked")] if rate else []
    return Plot("Cost of a request rate, by the cheapest layout", "requests/s", "$/h", series, marks=marks).svg()


def _ranking(plan: PlanResult) -> str:
    rows = [_row(candidate) for candidate in plan.candidates]
    shown = data_table(_HEAD, rows[: figures.LISTED_CANDIDATES], first=True)
    rest = rows[figures.LISTED_CANDIDATES :]
    return shown + (collapsible(f"{len(rest)} more", data_table(_HEAD, rest)) if rest else "")


def _row(candidate: Candidate) -> list[str]:
    return [
        f"{candidate.replicas}x {candidate.name}",
        candidate.gpu.name,
        str(candidate.gpus),
        f"{candidate.cost.hourly:,.2f}",
        f"{candidate.cost.input_per_million:.3f}",
        f"{candidate.cost.output_per_million:.3f}",
        figures.milliseconds(candidate.point.ttft_p95),
        figures.milliseconds(candidate.point.tpot_p95),
        f"{candidate.capacity:.1f}",
        f"{candidate.point.per_gpu:,.0f}",
        f"{candidate.point.per_user:,.0f}",
    ]


def _rejected(plan: PlanResult) -> str:
    if not plan.rejections:
        return ""
    rows = [[candidate.layout, candidate.gpu, candidate.reason] for candidate in plan.rejections]
    return "<h2>Rejected layouts</h2>" + collapsible(
        f"{len(rows)}, each with its reason", data_table(["Layout", "GPU", "Why"], rows, words=True)
    )
