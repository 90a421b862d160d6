"""The mock engine's own files are found where Triton's stub would find them: among the engine model's runtimes."""

from tests.support.mock_engine.repository import MODEL_FILES
from tests.support.model_code import put_on_path

put_on_path("tensorrt_llm")

import llmops_engine.runtimes  # noqa: E402

llmops_engine.runtimes.__path__.append(str(MODEL_FILES / "runtimes"))
