"""Which versions of other distributions are installed, without importing them."""

from __future__ import annotations

import functools
import os
import subprocess
from importlib import metadata

# TensorRT-LLM may have a Python of its own (Dockerfile.trtllm): the name of its interpreter
TRTLLM_PYTHON = "LLMOPS_TRTLLM_PYTHON"


def installed_version(name: str) -> str:
    """The version of the distribution `name`; empty where it is not installed."""
    python = os.environ.get(TRTLLM_PYTHON)
    if name == "tensorrt_llm" and python:
        return _version_there(python, name)
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def _version_there(python: str, name: str) -> str:
    code = f"from importlib.metadata import version; print(version({name!r}))"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()
