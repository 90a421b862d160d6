"""NVIDIA's aiperf and `llmops bench` on the same load, against a server with known delays.

`python -m llmops.perf.peers.aiperf TOKENIZER` where TOKENIZER is a folder with tokenizer.json (aiperf counts with it).
The server runs in a process of its own and answers each request after the same delays, so whatever the two programs
report differently is their own doing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from llmops.perf.harness.figures import Section
from llmops.perf.harness.load import run
from llmops.perf.harness.stack import process
from llmops.perf.peers.environment import peer_python

WHEEL = "aiperf==0.13.0"
TTFT, ITL, TOKENS, STREAMS, REQUESTS = 200.0, 20.0, 64, 16, 96
# figure: (name in aiperf's export, the server's own value in ms)
FIGURES = {
    "ttft": ("time_to_first_token", TTFT),
    "tpot": ("inter_token_latency", ITL),
    "e2e": ("request_latency", TTFT + (TOKENS - 1) * ITL),
}


def aiperf(url: str, tokenizer: Path) -> dict[str, Any]:
    """aiperf's own export of the run."""
    python = peer_python("aiperf", [[WHEEL]])
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
        command = [str(python.parent / "aiperf"), "profile", *flags, "--streaming", "--use-server-token-count"]
        subprocess.run([*command, "--output-artifact-dir", folder], check=True, capture_output=True, timeout=300)
        export: dict[str, Any] = json.loads(Path(folder, "profile_export_aiperf.json").read_text())
        return export


def measure(tokenizer: Path) -> Section:
    """Both programs' p50, and what the server did."""
    text = (
        f"{REQUESTS} requests, {STREAMS} at a time; {TOKENS} tokens, the first after {TTFT:g} ms, one every {ITL:g} ms."
    )
    section = Section("llmops bench against aiperf", "python -m llmops.perf.peers.aiperf TOKENIZER", text)
    with section:
        delays = ["--ttft-ms", str(TTFT), "--itl-ms", str(ITL)]
        server = [sys.executable, "-m", "llmops.perf.delay_server", *delays]
        with process(server, r"listening on (http://\S+)") as (_, url):
            ours = run(url, output=TOKENS, concurrency=STREAMS, requests=REQUESTS).summary
            theirs = aiperf(url, tokenizer)
        for name, (key, truth) in FIGURES.items():
            mine = getattr(ours, name).p50
            section.add(f"{name} p50, llmops bench", mine, "ms")
            section.add(f"{name} p50, aiperf", theirs[key]["p50"], "ms")
            section.add(f"{name}: llmops bench off the set {truth:g} ms by", 100 * abs(mine / truth - 1), "%", 2)
        section.add("output tokens/s, llmops bench", ours.output_tokens_per_second, "tokens/s")
        section.add("output tokens/s, aiperf", theirs["output_token_throughput"]["avg"], "tokens/s")
    return section


@click.command()
@click.argument("tokenizer", type=click.Path(path_type=Path, exists=True))
def main(tokenizer: Path) -> None:
    """Run both programs, one after the other."""
    measure(tokenizer)


if __name__ == "__main__":
    main()
