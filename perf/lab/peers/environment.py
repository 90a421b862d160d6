"""A virtual environment per peer under .cache/peers, made once from public wheels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from llmops.errors import MissingDependencyError

ROOT = Path(".cache/peers")
INSTALL_SECONDS = 300.0  # per call of pip
_LITELLM = """
    aiohttp>=3.14.2 anyio apscheduler azure-identity azure-storage-blob backoff backports-zstd boto3 certifi click
    cryptography expression fastapi fastapi-sso fastuuid granian gunicorn hiredis httpx[http2]<1 httpx2<3
    huggingface-hub<2 importlib-metadata>=8,<9 inquirerpy jinja2 jsonschema litellm-proxy-extras mcp>=2.3,<3 openai<4
    orjson polars prisma<1 pydantic pydantic-settings pyjwt pynacl python-dotenv python-multipart pyyaml redis
    restrictedpython rich rq soundfile starlette tiktoken tokenizers tomlkit typing-extensions uvicorn uvloop
    websockets>=15.0.1,<16
"""
# arguments of `pip install`, call by call
WHEELS: dict[str, list[list[str]]] = {
    "llamacpp": [["--no-deps", "xllamacpp==2026.10.11549"]],
    # without --no-deps pip looks for a wheel that is not on the public registry
    "dynamo": [
        ["--no-deps", "ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"],
        ["aiohttp", "msgspec", "prometheus-client", "pyzmq", "transformers>=4.56,<5.6", "zstandard", "redis<9"],
        ["uvloop"],
    ],
    "smg": [["--no-deps", "smg==1.13.0"], ["setproctitle", "grpcio", "grpcio-health-checking", "pyyaml"]],
    "aiperf": [["aiperf==0.13.0"]],
    # without --no-deps pip looks for a certifi and extras that are not on every registry; what clouds need is left out
    "litellm": [
        ["--no-deps", "litellm==1.109.1", "litellm-enterprise==0.1.82"],
        _LITELLM.split(),
    ],
}  # fmt: skip


def peer_python(name: str) -> Path:
    """The interpreter of a peer of WHEELS, installed if it is not there yet.

    BENCH_PEER_<NAME> names an interpreter to use instead. Raises MissingDependencyError when pip fails.
    """
    given = os.environ.get(f"BENCH_PEER_{name.upper()}")
    if given:
        return Path(given)
    folder = ROOT / name
    python, done = folder / "bin" / "python", folder / ".installed"
    if not done.is_file():
        print(f"  installing {name} into {folder} …", flush=True)
        shutil.rmtree(folder, ignore_errors=True)  # the remains of an earlier attempt
        _run([sys.executable, "-m", "venv", str(folder)], name)
        for step in WHEELS[name]:
            _run([str(python), "-m", "pip", "install", "-q", "--no-compile", *step], name)
        done.touch()
    return python


def install(names: Iterable[str]) -> dict[str, str]:
    """Install these peers; those that cannot be, with the reason."""
    missing = {}
    for name in sorted(names):
        try:
            peer_python(name)
        except MissingDependencyError as error:
            missing[name] = str(error)
    return missing


def _run(command: list[str], name: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=INSTALL_SECONDS)
    except subprocess.CalledProcessError as error:
        why = error.stderr.strip().splitlines()[-1:] or [f"exit {error.returncode}"]
        raise MissingDependencyError(f"{name} cannot be installed: {why[0]}.") from error
    except (subprocess.TimeoutExpired, OSError) as error:
        raise MissingDependencyError(f"{name} cannot be installed: {error}.") from error
