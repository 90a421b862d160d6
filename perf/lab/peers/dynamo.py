"""Dynamo's Rust frontend in front of its mocker: `python -m llmops.perf.lab.peers.dynamo ENGINE`.

The mocker stands in for an engine as the mock engine does for ours, so the frontend's own CPU per streamed token can be
held against the gateway's, in the same run. Tokenizer and chat template are those of ENGINE.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.errors import ServerError
from llmops.perf.lab.harness.figures import Section
from llmops.perf.lab.harness.load import options, window
from llmops.perf.lab.harness.processes import CpuMeter
from llmops.perf.lab.harness.script import script
from llmops.perf.lab.harness.servers import free_port
from llmops.perf.lab.harness.stack import Service, gateway, process, triton
from llmops.perf.lab.mock_engine.repository import make_mock_engine
from llmops.perf.lab.peers.environment import peer_python
from llmops.perf.load.event_loop import run_async

STREAMS = (32, 128)
READY_SECONDS = 120.0
SETTLE, WINDOW = 4.0, 6.0  # seconds: until all streams are open, and over which CPU is read


@contextlib.contextmanager
def dynamo(
    engine: Path, workers: int = 1, mocker: Sequence[str] = (), router: Sequence[str] = ()
) -> Iterator[tuple[Service, list[Service]]]:
    """(frontend, mockers), ready; more options for each. The frontend's `address` ends in /v1."""
    python = str(peer_python("dynamo"))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = _model_folder(engine, Path(folder, "model"))
        env = {"DYN_FILE_KV": str(Path(folder, "store")), "DYN_LOG": "warn"}
        planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
        command = [python, "-u", "-m", "dynamo.mocker", "--model-path", str(model), "--model-name", "mock", *planes]
        mockers = []
        for _ in range(workers):
            port = str(_small_port())
            pid, _ = stack.enter_context(process([*command, *mocker], None, {**env, "DYN_SYSTEM_PORT": port}))
            mockers.append(Service("", pid, f"http://127.0.0.1:{port}/metrics"))
        port = str(free_port())
        address = ["--http-host", "127.0.0.1", "--http-port", port, "--router-min-initial-workers", str(workers)]
        frontend = [python, "-u", "-m", "dynamo.frontend", *address, *planes, *router]
        frontend_pid, _ = stack.enter_context(process(frontend, None, env))
        url = f"http://127.0.0.1:{port}/v1"
        _wait_model(url)
        yield Service(url, frontend_pid), mockers


def _model_folder(engine: Path, folder: Path) -> Path:
    """What Dynamo reads of a checkpoint: tokenizer, template and the outline of a small Llama."""
    tokenizer = EngineManifest.load(engine).tokenizer
    shutil.copytree(engine / tokenizer.directory, folder)
    outline = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.vocab_size,
        "max_position_embeddings": 8192,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.end_ids[0],
    }
    (folder / "config.json").write_text(json.dumps(outline))
    return folder


def _small_port() -> int:
    """A free port of at most 15 bits: Dynamo 1.6.1 reads DYN_SYSTEM_PORT as a signed number of 16."""
    while True:
        port = random.randrange(10_000, 1 << 15)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


def _wait_model(url: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/models", timeout=2) as response:
                if json.load(response)["data"]:
                    return
        except (urllib.error.URLError, OSError, ValueError, KeyError):
            pass
        time.sleep(0.3)
    raise ServerError(f"Dynamo at {url} listed no model within {READY_SECONDS:.0f} s.")


def measure(engine: Path) -> Section:
    """CPU per streamed token of Dynamo's frontend, and of our gateway under the same load at the same pace."""
    text = (
        "Dynamo 1.6.1's frontend in front of its mocker; then our gateway in front of the mock engine, which is set to "
        "the pace the mocker had. Same tokenizer, same streams, same load generator; CPU is the processes' own."
    )
    section = Section("Dynamo's frontend beside the gateway", "python -m llmops.perf.lab.peers.dynamo ENGINE", text)
    with section:
        theirs = _dynamo_costs(engine)
        for streams, cost in theirs.items():
            ours = _gateway_cost(engine, streams, cost.period)
            section.add(f"Dynamo's frontend, {streams} streams", cost.micros, "µs/token")
            section.add(f"gateway, {streams} streams", ours.micros, "µs/token")
            section.add(f"Dynamo / gateway, {streams} streams", cost.micros / ours.micros, "×")
            section.add(f"pace of both, {streams} streams: Dynamo", 1e3 * cost.period, "ms/token")
            section.add(f"pace of both, {streams} streams: gateway", 1e3 * ours.period, "ms/token")
    return section


class Cost(NamedTuple):
    """CPU per token in µs, and seconds between two tokens of a stream."""

    micros: float
    period: float


def _dynamo_costs(engine: Path) -> dict[int, Cost]:
    with dynamo(engine) as (frontend, _):
        return {streams: _cost(frontend, streams) for streams in STREAMS}


def _gateway_cost(engine: Path, streams: int, period: float) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        make_mock_engine(engine, Path(folder, "mock"), period)
        with triton(Path(folder, "mock")) as server, gateway(server.address) as front:
            return _cost(front, streams)


def _cost(front: Service, streams: int) -> Cost:
    meter = CpuMeter({"front": front.pids})
    load = options(front.address, output=1500, concurrency=streams, requests=streams, warmup=0)
    used, tokens, _ = run_async(window(load, meter, settle=SETTLE, seconds=WINDOW))
    return Cost(1e6 * used["front"] / max(tokens, 1), used["wall"] * streams / max(tokens, 1))


if __name__ == "__main__":
    script(measure, "ENGINE", "Measure Dynamo's frontend and the gateway, with the tokenizer of ENGINE.")()
