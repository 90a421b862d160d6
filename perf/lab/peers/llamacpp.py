"""llama.cpp's server, same machine, GGUF and load: `python -m llmops.perf.lab.peers.llamacpp GGUF`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from llmops.perf.lab.harness.figures import Section
from llmops.perf.lab.harness.load import run
from llmops.perf.lab.harness.stack import Service, process
from llmops.perf.lab.peers.environment import peer_python

STREAMS = (1, 8, 32)
# its own names of what other servers call ignore_eos and greedy
EXTRA = {"cache_prompt": False, "temperature": 0, "samplers": []}


@contextlib.contextmanager
def llamacpp(gguf: Path, slots: int = 32) -> Iterator[Service]:
    """The server, ready. `address` ends in /v1."""
    script = Path(__file__).with_name("llamacpp_server.py")
    command = [str(peer_python("llamacpp")), str(script), str(gguf), "--parallel", str(slots)]
    with process(command, r"listening at (http://\S+)", _own_environment()) as (pid, url):
        yield Service(f"{url}/v1", pid)


def _own_environment() -> dict[str, str]:
    return {key: "" for key in ("PYTHONPATH",) if key in os.environ}


def tokens_per_second(server: Service, streams: int, requests: int, output: int = 64) -> float:
    """64 tokens in, `output` out, `streams` at a time."""
    load: dict[str, Any] = {"concurrency": streams, "requests": requests, "warmup": 0}
    document = run(server.address, output=output, via="completions", model="m", extra=EXTRA, **load)
    return document.summary.output_tokens_per_second


@click.command()
@click.argument("gguf", type=click.Path(path_type=Path, exists=True))
def main(gguf: Path) -> None:
    """Measure tokens/s at 1, 8 and 32 streams."""
    section = Section("llama.cpp server", "python -m llmops.perf.lab.peers.llamacpp GGUF", "64 tokens in, 64 out.")
    with section, llamacpp(gguf) as server:
        tokens_per_second(server, 1, 1)
        for streams in STREAMS:
            section.add(f"{streams} streams", tokens_per_second(server, streams, 3 * streams), "tokens/s")


if __name__ == "__main__":
    main()
