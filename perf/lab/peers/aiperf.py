"""NVIDIA's aiperf and `llmops bench` on the same load, against a server with known delays.

`python -m llmops.perf.lab.peers.aiperf TOKENIZER` TOKENIZER: a folder with tokenizer.json (aiperf counts with it).
The server runs in a process of its own and answers each request after the same delays, so whatever the two programs
report differently is their own doing.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmops.errors import MissingDependencyError
from llmops.perf.lab.harness.figures import Section
from llmops.perf.lab.harness.load import run
from llmops.perf.lab.harness.script import script
from llmops.perf.lab.harness.stack import process
from llmops.perf.lab.peers.environment import peer_python
from llmops.perf.report.summary import Summary

TTFT, ITL, TOKENS, STREAMS, REQUESTS = 200.0, 20.0, 64, 16, 96
BUSY_STREAMS = 100
# percent; its first tokens come later, by what its own processes take
WITHIN = {"ttft": 5, "tpot": 2, "e2e": 2}
# figure: (name in aiperf's export, the server's own value in ms)
FIGURES = {
    "ttft": ("time_to_first_token", TTFT),
    "tpot": ("inter_token_latency", ITL),
    "e2e": ("request_latency", TTFT + (TOKENS - 1) * ITL),
}


def aiperf(url: str, tokenizer: Path) -> dict[str, Any]:
    """aiperf's own export of the run."""
    python = peer_python("aiperf")
    given: dict[str, object] = {
        "model": "delay",
        "url": url.removesuffix("/v1"),
        "endpoint-type": "chat",
        "concurrency": STREAMS,
        "request-count": REQUESTS,
        "warmup-request-count": STREAMS,
        "prompt-input-tokens-mean": 64,
        "prompt-input-tokens-stddev": 0,
        "prompt-output-tokens-mean": TOKENS,
        "prompt-output-tokens-stddev": 0,
        "tokenizer": tokenizer.resolve(),
        "ui-type": "none",
    }
    with tempfile.TemporaryDirectory() as folder:
        flags = [part for name, value in given.items() for part in (f"--{name}", str(value))]
        flags += ["--streaming", "--use-server-token-count", "--no-server-metrics", "--no-gpu-telemetry"]
        command = [str(python.parent / "aiperf"), "profile", *flags, "--output-artifact-dir", folder]
        _complete(subprocess.run(command, capture_output=True, text=True, timeout=120))
        export: dict[str, Any] = json.loads(Path(folder, "profile_export_aiperf.json").read_text())
        return export


def _complete(done: subprocess.CompletedProcess[str]) -> None:
    """It counts as failed also when only a part of it did not report."""
    if done.returncode:
        said = [line.strip("│╭╰─╮╯ ") for line in (done.stdout + done.stderr).splitlines()]
        why = next((line for line in said if line.startswith(("Reason:", "Error:"))), f"exit {done.returncode}")
        raise MissingDependencyError(f"it says {why}")


def measure(tokenizer: Path) -> Section:
    """Both programs' p50, and what the server did; without aiperf, ours against the server alone."""
    text = (
        f"{REQUESTS} requests, {STREAMS} at a time; {TOKENS} tokens, the first after {TTFT:g} ms, one every {ITL:g} "
        "ms, from a server with just these delays."
    )
    section = Section("The load generator", "python -m llmops.perf.lab.peers.aiperf TOKENIZER", text)
    with section, _server(TTFT, ITL) as url:
        ours = run(url, output=TOKENS, concurrency=STREAMS, requests=REQUESTS).summary
        _against_truth(ours, section)
        own_cost(section)
        try:
            _against_aiperf(ours, aiperf(url, tokenizer), section)
        except (MissingDependencyError, subprocess.SubprocessError, OSError) as error:
            section.lack(f"aiperf did not run: {error}")
    return section


@contextlib.contextmanager
def _server(ttft: float, itl: float) -> Iterator[str]:
    command = [sys.executable, "-m", "llmops.perf.lab.delay_server", "--ttft-ms", str(ttft), "--itl-ms", str(itl)]
    with process(command, r"listening on (http://\S+)") as (_, url):
        yield url


def _against_truth(ours: Summary, section: Section) -> None:
    for name, (_, truth) in FIGURES.items():
        section.add(f"{name} p50", getattr(ours, name).p50, "ms")
        section.add(f"{name}: off the set {truth:g} ms by", 100 * abs(getattr(ours, name).p50 / truth - 1), "%", 2)


def _against_aiperf(ours: Summary, theirs: dict[str, Any], section: Section) -> None:
    for name, (key, _) in FIGURES.items():
        section.add(f"{name} p50, aiperf", theirs[key]["p50"], "ms")
        off = 100 * abs(theirs[key]["p50"] / getattr(ours, name).p50 - 1)
        section.add(f"{name}: aiperf off ours by", off, "%", WITHIN[name])
    section.add("output tokens/s", ours.output_tokens_per_second, "tokens/s")
    section.add("output tokens/s, aiperf", theirs["output_token_throughput"]["avg"], "tokens/s")


def own_cost(section: Section) -> None:
    """What measuring takes at 5,000 tokens/s, and whether the figures stay right meanwhile."""
    with _server(TTFT, ITL) as url:
        busy = run(url, output=200, concurrency=BUSY_STREAMS, requests=2 * BUSY_STREAMS).summary
    assert busy.tpot is not None
    section.add(f"load generator, {BUSY_STREAMS} streams", busy.own_cpu_us_per_token or 0.0, "µs/token")
    section.add("its share of one core then", 100 * busy.own_cpu_share, "%", 20)
    section.add(f"tpot p50 then: off the set {ITL:g} ms by", 100 * abs(busy.tpot.p50 / ITL - 1), "%", 2)


if __name__ == "__main__":
    script(measure, "TOKENIZER", "Run both programs, one after the other.")()
