"""The mock engine's own files are found where Triton's stub would find them: among the engine model's runtimes."""

from __future__ import annotations

import sys
import types
from pathlib import Path

from tests.support.model_code import version_folder

ROOT = Path(__file__).parents[2]

sys.path.append(str(version_folder("tensorrt_llm")))
sys.modules.setdefault("triton_python_backend_utils", types.SimpleNamespace(TRITONSERVER_RESPONSE_COMPLETE_FINAL=1))

import llmops_engine.runtimes  # noqa: E402

llmops_engine.runtimes.__path__.append(str(ROOT / "tests" / "support" / "mock_engine" / "llmops_engine" / "runtimes"))
