"""The report of one run: as JSON, and as lines for people."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from llmops import __version__
from llmops.perf.verify.findings import CheckOutcome, Verdict

FORMAT = "llmops-verify/1"
# of a contract's capability, as a reader should see it
SAID: dict[Verdict, str] = {
    "works": "works",
    "refused": "refused as announced",
    "unseen": "could not be seen",
    "wrong": "WRONG",
}


@dataclass
class VerifyReport:
    """`address` is where the model was asked; `promised` whether an engine folder said what to expect."""

    model: str
    address: str
    target: str
    device: str
    promised: bool
    results: list[CheckOutcome] = field(default_factory=list)
    seconds: float = 0.0
    created: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))

    @property
    def faults(self) -> list[str]:
        """One sentence each."""
        return [result.fault for result in self.results if result.fault is not None]

    def summary(self) -> str:
        """One line."""
        count = Counter(result.finding.verdict for result in self.results)
        parts = [f"{count[verdict]} {said}" for verdict, said in SAID.items() if count[verdict]]
        return f"{len(self.results)} checks of {self.model} in {self.seconds:.0f} s: {', '.join(parts)}."

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["results"] = [
            {"part": one.part, "name": one.name, "seconds": round(one.seconds, 3), **asdict(one.finding)}
            for one in self.results
        ]
        return {"format": FORMAT, "llmops": __version__, "passed": not self.faults, "faults": self.faults, **data}


def verdict_of(result: CheckOutcome) -> str:
    """ANNOUNCED AND WRONG where a promise was broken."""
    if result.finding.verdict == "wrong" and result.part == "contract":
        return "ANNOUNCED AND WRONG"
    return SAID[result.finding.verdict]
