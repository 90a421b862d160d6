"""Plant the faults behind eight alerts and watch these fire: `python -m tests.faults.alerts ENGINE`."""

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tests.faults.alerts.clients import Habits, clients
from tests.support.mock_engine.llmops_engine.runtimes.faults import command_faults
from tests.support.mock_engine.planned import constant
from tests.support.mock_engine.served import served_mock_engine
from tests.support.pages import Page, PageServer
from tests.support.prometheus.server import Prometheus, prometheus
from tests.support.stack import Service, gateway

ALERTS = Path("deploy", "alerts")
MODEL = "mock"
CLIENTS, BLOCKS = 6, 4096
# seconds per step, and per token of a prompt; a slow engine takes so many times as long
STEP, READ, SLOW = 0.005, 1e-6, 250.0
SECONDS = 90.0
# as control would tell it, and a DCGM exporter
PLAYED = {
    'DCGM_FI_PROF_DRAM_ACTIVE{Hostname="gpu-7",modelName="NVIDIA H100 80GB HBM3"}': 0.6,
    'DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{Hostname="gpu-7",modelName="NVIDIA H100 80GB HBM3"}': 0.3,
    'llmops_spent_dollars{tenant="acme"}': 412.5,
    'llmops_spent_tokens{tenant="acme",kind="input"}': 3.1e8,
    'llmops_model_spent_dollars{model="mock"}': 412.5,
    'llmops_budget_used_ratio{tenant="acme"}': 0.41,
    'llmops_degraded_level{model="mock"}': 0,
}
SERVER_LOST = "GpuNodeFailure"
# the alerts that fire while Triton runs
PLANTED = {"LlmGoodputDrop", "LlmTtftSpike", "GpuKvCacheNearOom", "LlmPrefixCacheHitRateDrop", "LlmBillingLag"}
PLANTED |= {"LlmRequestAbortRateSpike", "LlmQualityRegression"}


@dataclass
class Watched:
    """A stack that Prometheus looks at, and what can be done to it.

    Attributes:
        told: Metrics that no process of the stack has: those of evaluations, which the node exporter reads from a
            file, and of a ledger, each series by its name with its labels.
    """

    prometheus: Prometheus
    triton: Service
    gateway: Service
    habits: Habits
    told: dict[str, float]
    faults: Path

    def settle(self) -> None:
        """Wait until all is well: traffic whose prompts are in the cache, and no alert."""
        baseline = {f'llm_eval_{of}{{model="{MODEL}",eval="top1"}}': 0.99 for of in ("score", "baseline")}
        self.told.update({**baseline, **PLAYED, "llmops_usage_lag_seconds": 0.5})
        command_faults(self.faults)
        self.habits.alike, self.habits.leaving = True, False
        good = "llm_goodput_ratio > 0.95 and on (model) llm_prefix_cache_hit_rate > 0.5"
        self._wait(lambda: bool(self.prometheus.query(good)), "goodput and cached prompts")
        self._wait(lambda: not self.prometheus.firing(), "no alert")

    def plant(self) -> None:
        """A slow engine whose cache is full, clients that leave, prompts that share nothing, a worse model, and a
        ledger that stands still; until every expected alert fires."""
        self.habits.alike, self.habits.leaving = False, True
        command_faults(self.faults, slow=SLOW, lie={"kv_blocks_used": round(0.97 * BLOCKS)})
        self.told[f'llm_eval_score{{model="{MODEL}",eval="top1"}}'] = 0.9
        self.told["llmops_usage_lag_seconds"] = 400.0
        self._wait(lambda: self.prometheus.firing() >= PLANTED, f"all of {sorted(PLANTED)}")

    def lose_triton(self) -> None:
        os.kill(self.triton.pid, signal.SIGKILL)
        self._wait(lambda: SERVER_LOST in self.prometheus.firing(), SERVER_LOST)

    def _wait(self, holds: Callable[[], object], what: str) -> None:
        self.prometheus.wait(holds, SECONDS, what)


@contextlib.contextmanager
def watched(engine: Path) -> Iterator[Watched]:
    """The mock engine on the real Triton, a gateway, clients, and Prometheus with the rules of deploy/."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        faults, settings = folder / "faults.json", folder / "gateway.yaml"
        settings.write_text("slo: {ttft_p95: 500ms, tpot_p95: 250ms}\nrefresh: 0.5s\n")
        paged = constant(STEP, READ, BLOCKS)
        triton = stack.enter_context(served_mock_engine(engine, STEP, paged=paged, faults=faults))
        front = stack.enter_context(gateway(triton.address, "--config", str(settings)))
        told: dict[str, float] = {}
        plain = {"content-type": "text/plain; version=0.0.4"}
        pages = PageServer(lambda _: Page("".join(f"{one} {told[one]}\n" for one in [*told]), headers=plain))
        other = stack.enter_context(pages)
        urls = {"llmops-gateway": front.address, "llmops-triton": triton.metrics, "told": other.url}
        targets = {name: [urlsplit(url).netloc] for name, url in urls.items()}
        looking = stack.enter_context(prometheus(targets, sorted(ALERTS.absolute().glob("*.yaml"))))
        habits = stack.enter_context(clients(front.address, MODEL, CLIENTS))
        yield Watched(looking, triton, front, habits, told, faults)
