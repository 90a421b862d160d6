"""Print a plan in the terminal."""

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from llmops.build.plan.report import figures
from llmops.build.plan.report.curves import MARKS, character_plot, frontiers
from llmops.build.plan.search.candidate import Candidate
from llmops.build.plan.search.layout_search import PlanResult
from llmops.build.plan.search.plan_summary import accuracy_warning

#: Minimum width of a terminal, in columns, for facts and memory side by side.
WIDE_COLUMNS = 100


def print_plan(plan: PlanResult, console: Console) -> None:
    """Print the ranking, the best layout with its memory, the Pareto plot and the rejected layouts."""
    console.print(Text(figures.title(plan), style="bold"))
    console.print(_ranking(plan, console.width >= WIDE_COLUMNS))
    disaggregated = figures.disaggregated_saving(plan)
    if disaggregated:
        console.print(Text(disaggregated, style="dim"))
    console.print(_best(plan, console.width))
    console.print(Group(*_pareto(plan, console.width)))
    if plan.rejections:
        console.print(_rejected(plan))
    warning = accuracy_warning(plan)
    if warning:
        console.print(Text(warning, style="yellow"))
    for gpu, source in plan.timing.items():
        console.print(Text(f"Times for {gpu}: {source}. Prices are from --price, or assumed.", style="dim"))


def _ranking(plan: PlanResult, wide: bool) -> Table:
    table = Table(title=None, box=None, header_style="bold", pad_edge=False)
    columns = ["#", "GPU", "layout", "GPUs", "$/h", "$/M out", "TTFT p95", "TPOT p95", "max req/s"]
    columns += ["tok/s/GPU", "tok/s/user"] if wide else []
    for name in columns:
        left = name in ("GPU", "layout")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "layout")
    for place, candidate in enumerate(plan.candidates[: figures.LISTED_CANDIDATES], 1):
        table.add_row(*_row(place, candidate, wide), style="green" if place == 1 else None)
    return table


def _row(place: int, candidate: Candidate, wide: bool) -> list[str]:
    point = candidate.point
    cells = [
        str(place),
        candidate.gpu.name,
        f"{candidate.replicas}x {candidate.name}",
        str(candidate.gpus),
        f"{candidate.cost.hourly:,.2f}",
        f"{candidate.cost.output_per_million:.2f}",
        figures.milliseconds(point.ttft_p95),
        figures.milliseconds(point.tpot_p95),
        f"{candidate.capacity:.1f}",
    ]
    return [*cells, f"{point.per_gpu:,.0f}", f"{point.per_user:,.0f}"] if wide else cells


def _best(plan: PlanResult, width: int) -> Panel:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    for name, value in figures.best_layout_rows(plan):
        facts.add_row(name, value)
    memory = _memory(plan.best, plan.best.memory.total)
    body: Group | Table
    if width >= WIDE_COLUMNS:
        body = Table.grid(padding=(0, 3))
        body.add_row(facts, memory)
    else:
        body = Group(facts, Text(), memory)
    return Panel(body, title=f"Best: {plan.best.gpu.name} {plan.best.name}", title_align="left")


def _memory(candidate: Candidate, total: int) -> Table:
    table = Table.grid(padding=(0, 1))
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_row(Text("memory per GPU", style="bold"), Text(figures.gigabytes(total), style="bold"), "")
    for name, size, bytes_ in figures.memory_rows(candidate):
        table.add_row(name, size, Text("█" * round(16 * bytes_ / total), style="cyan"))
    return table


def _pareto(plan: PlanResult, width: int) -> list[Text]:
    lines = frontiers(plan.curves)
    legend = "  ".join(f"{mark} {gpu}" for mark, gpu in zip(MARKS * 4, lines, strict=False))
    heading = Text(f"Tokens/s per GPU against tokens/s per user   {legend}", style="bold")
    return [heading, *(Text(row) for row in character_plot(lines, min(width, WIDE_COLUMNS)))]


def _rejected(plan: PlanResult) -> Table:
    table = Table(
        box=None, show_header=False, pad_edge=False, title="Rejected", title_justify="left", title_style="bold"
    )
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for rejection in plan.rejections:
        table.add_row(rejection.gpu, rejection.layout, rejection.reason)
    return table
