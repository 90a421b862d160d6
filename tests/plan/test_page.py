"""The HTML page of a plan: what a reader finds on it, and that its figures are the plan's."""

import re

import pytest

from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.plan.report.curves import cost_by_rate
from llmops.build.plan.report.html_report import render_page
from llmops.build.plan.search.layout_search import PlanResult, search_layouts
from llmops.build.plan.search.plan_request import PlanRequest
from llmops.build.plan.search.serving_cost import ApiPrice
from llmops.build.plan.speed.workload import PlanWorkload
from llmops.build.plan.timing.roofline import RooflineTimes
from llmops.build.quant_formats import FORMATS
from llmops.html_pages.plots import BAR_WIDTH, stacked_bar
from tests.support.page_reader import PageReader


@pytest.fixture(scope="module")
def plan(models) -> PlanResult:
    load = PlanWorkload(2000, 300, qps=20, ttft_p95=1.0, tpot_p95=0.04)
    gpus = (find_gpu("h100-sxm"), find_gpu("h200-sxm"))
    price = ApiPrice(0.5, 2.0)
    request = PlanRequest("acme/seventy-b", models.LLAMA31_70B, FORMATS["fp8"], "fp8", load, gpus, api=price)
    return search_layouts(request, RooflineTimes)


def test_the_answer_and_six_figures_stand_on_top(plan):
    text = render_page(plan)
    read, best = PageReader(text).found, plan.best
    assert read["h1"] == ["acme/seventy-b"]
    answer = re.search(r'class="answer">([^<]*)<', text).group(1)
    assert answer.startswith(f"{best.gpus} {best.gpu.name} GPU")
    assert "20 requests/s of 2,000 + 300 tokens within TTFT p95 1,000 ms and TPOT p95 40.0 ms" in answer
    assert len(read["dt"]) == len(read["dd"]) == 6
    assert read["dd"][0] == str(best.gpus)
    assert text.index("answer") < text.index("<svg")


def test_the_memory_bar_is_as_long_as_the_memory(plan):
    sizes = [("a", 30.0, "30"), ("b", 10.0, "10"), ("free", 60.0, "60")]
    widths = [float(width) for width in re.findall(r'<rect x="[\d.]+" y="0" width="([\d.]+)"', stacked_bar("t", sizes))]
    assert widths == [0.3 * BAR_WIDTH, 0.1 * BAR_WIDTH, 0.6 * BAR_WIDTH]
    bar = render_page(plan).split("Memory of one GPU")[1].split("<details>")[0]
    widths = [float(width) for width in re.findall(r'<rect x="[\d.]+" y="0" width="([\d.]+)"', bar)]
    assert sum(widths) == pytest.approx(BAR_WIDTH, abs=0.5)
    kv = plan.best.memory.kv_cache / plan.best.memory.total
    assert widths[0] == pytest.approx(kv * BAR_WIDTH, abs=0.1)


def test_cost_against_rate_is_the_ranking_at_the_rate_asked(plan):
    lines = cost_by_rate(plan)
    assert set(lines) == {"h100-sxm", "h200-sxm", "API"}
    for gpu in ("h100-sxm", "h200-sxm"):
        cheapest = min(one.cost.hourly for one in plan.candidates if one.gpu.name == gpu)
        assert dict(lines[gpu])[20.0] == pytest.approx(cheapest)
        costs = [cost for _, cost in lines[gpu]]
        assert costs == sorted(costs)
    # 20 requests/s for an hour, each 2,000 tokens at $0.5 and 300 at $2 per million
    assert dict(lines["API"])[20.0] == pytest.approx(20 * 3600 * (2000 * 0.5 + 300 * 2) / 1e6)
