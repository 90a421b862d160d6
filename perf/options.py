"""The options of a benchmark, and the interface for its progress."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmops.errors import InputError
from llmops.objectives import Objective
from llmops.perf.clients.base import RequestOptions
from llmops.perf.load.sweep import SweepStep
from llmops.perf.records import Record
from llmops.perf.workloads.lengths import Lengths
from llmops.urls import without_secrets


@dataclass
class BenchOptions(RequestOptions):
    """The options of `llmops bench`. Lengths are in tokens, times in seconds, rates per second.

    `perf/bench.py` passes the options to the load (`StopCondition`, `Runner`) and to the prompts
    (`SyntheticSpec`). The clients read the options of `RequestOptions`.
    """

    url: str
    model: str | None
    via: str
    input: Lengths
    output: Lengths
    requests: int | None = None
    duration: float | None = None
    # Number of users of a closed loop, or the maximum number of concurrent requests of an open
    # loop.
    concurrency: int | None = None
    rate: float | None = None
    arrival: str = "poisson"
    warmup: int | None = None
    think_time: float = 0.0
    turns: Lengths | None = None
    prefix_tokens: int = 0
    tools: int = 0
    cancel_share: float = 0.0
    prompts: Path | None = None
    trace: Path | None = None
    slos: list[Objective] = field(default_factory=list)
    slo_share: float = 0.99
    sweep: bool = False
    seed: int = 0

    def check(self) -> None:
        """Raise InputError for options that cannot be combined."""
        if self.trace is not None and (self.rate or self.prompts or self.turns):
            raise InputError("--trace brings its own times and lengths; leave out --rate, --prompts and --turns.")
        if self.sweep and not self.slos:
            raise InputError("--sweep looks for the highest rate that meets the objectives; give at least one --slo.")
        if self.sweep and self.trace:
            raise InputError("--sweep sets the rate itself; leave out --trace.")
        if self.via in ("engine", "ensemble") and (self.tools or self.prompts):
            raise InputError("--tools and --prompts need an OpenAI endpoint; give one, such as http://HOST:9000/v1.")
        if (self.via in ("engine", "ensemble")) != self.url.startswith("grpc://"):
            raise InputError(
                f"--via {self.via} does not fit {without_secrets(self.url)}; give grpc:// for engine and ensemble, "
                "else http://."
            )
        made_up = [name for name in ("turns", "tools", "prefix_tokens", "cancel_share") if getattr(self, name)]
        if made_up and (self.trace or self.prompts):
            names = ", ".join("--" + name.removesuffix("_share").replace("_", "-") for name in made_up)
            raise InputError(
                f"{names} apply only to generated prompts; leave out --trace and --prompts, or these options."
            )
        if self.via == "ensemble" and self.turns:
            raise InputError("--turns cannot be sent to an ensemble; give --via engine, or a chat endpoint.")

    def public(self) -> dict[str, Any]:
        """Return the options as JSON values for the report, without the secrets that they contain."""
        hidden = {"api_key", "headers"}
        data = {key: value for key, value in asdict(self).items() if key not in hidden}
        for name in ("input", "output", "turns"):
            data[name] = getattr(self, name).text if getattr(self, name) else None
        data["prompts"], data["trace"] = (str(path) if path else None for path in (self.prompts, self.trace))
        data["url"] = without_secrets(self.url)
        data["slos"] = [str(slo) for slo in self.slos]
        return data


class BenchProgress:
    """A receiver of the progress of a benchmark.

    The base class does nothing; the command line overrides the methods.
    """

    def phase(self, name: str, sessions: int | None, seconds: float | None) -> None: ...

    def record(self, record: Record) -> None: ...

    def step(self, step: SweepStep) -> None: ...
