"""Dynamo's Rust frontend in front of its mocker: `python -m llmops.perf.peers.dynamo ENGINE`.

The mocker stands in for an engine as the fountain does for ours, so the frontend's own CPU per streamed token can be
held against the gateway's. Tokenizer and chat template are those of ENGINE.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import click

from llmops.build.manifest import EngineManifest
from llmops.errors import ServerError
from llmops.perf.harness.figures import Section
from llmops.perf.harness.load import options, window
from llmops.perf.harness.processes import CpuMeter
from llmops.perf.harness.stack import Service, process
from llmops.perf.load.loop import run_async
from llmops.perf.peers.environment import peer_python

# without --no-deps pip would want a wheel that is not on the public registry
STEPS = [
    ["--no-deps", "ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"],
    ["aiohttp", "msgspec", "prometheus-client", "pyzmq", "transformers>=4.56,<5.6", "zstandard", "redis<9", "uvloop"],
]
STREAMS = (32, 128)
READY_SECONDS = 120.0
WINDOW = 6.0


@contextlib.contextmanager
def dynamo(engine: Path) -> Iterator[tuple[Service, Service]]:
    """(frontend, mocker), ready. The frontend's `address` ends in /v1."""
    python = str(peer_python("dynamo", STEPS))
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = _model_folder(engine, Path(folder, "model"))
        env = {"DYN_FILE_KV": str(Path(folder, "store")), "DYN_LOG": "warn"}
        planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
        mocker = [python, "-u", "-m", "dynamo.mocker", "--model-path", str(model), "--model-name", "mock", *planes]
        frontend = [
            python,
            "-u",
            "-m",
            "dynamo.frontend",
            "--http-host",
            "127.0.0.1",
            "--http-port",
            str(port),
            *planes,
        ]
        mocker_pid, _ = stack.enter_context(process(mocker, None, env))
        frontend_pid, _ = stack.enter_context(process(frontend, None, env))
        url = f"http://127.0.0.1:{port}/v1"
        _wait_model(url)
        yield Service(url, frontend_pid), Service("", mocker_pid)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
    """The frontend's CPU per streamed token."""
    text = "Dynamo 1.6.1's frontend with its mocker at its default pace; CPU is the frontend process's own."
    section = Section("Dynamo's frontend", "python -m llmops.perf.peers.dynamo ENGINE", text)
    with section, dynamo(engine) as (frontend, mocker):
        for streams in STREAMS:
            meter = CpuMeter({"frontend": frontend.pids, "mocker": mocker.pids})
            load = options(frontend.address, output=1500, concurrency=streams, requests=streams, warmup=0)
            used, tokens, _ = run_async(window(load, meter, settle=4.0, seconds=WINDOW))
            section.add(f"Dynamo frontend, {streams} streams", 1e6 * used["frontend"] / max(tokens, 1), "µs/token")
            section.add(f"tokens/s meanwhile, {streams} streams", tokens / used["wall"], "tokens/s")
    return section


@click.command()
@click.argument("engine", type=click.Path(path_type=Path, exists=True))
def main(engine: Path) -> None:
    """Measure Dynamo's frontend with the tokenizer of ENGINE."""
    measure(engine)


if __name__ == "__main__":
    main()
