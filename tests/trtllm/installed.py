"""The stand-ins as installed libraries, where an engine model of a repository looks first."""

import shutil
from pathlib import Path
from typing import Any

from llmops.build.job.build_engine import build
from llmops.build.spec import BuildSpec
from llmops.model_repository.generate import generate_repository, read_engines
from tests.support.tiny_models import write_checkpoint
from tests.trtllm.test_adapters import write_adapter

HERE = Path(__file__).parent

#: A program in the place of mpirun: it starts the ranks, and ends with the last of them.
MPIRUN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
count, program = int(words[words.index("-n") + 1]), words[words.index("-n") + 2:]
ranks = [subprocess.Popen(program, env={{**os.environ, "OMPI_COMM_WORLD_RANK": str(rank),
                                        "OMPI_COMM_WORLD_SIZE": str(count)}}) for rank in range(count)]
codes = []
while len(codes) < count:
    pid, status = os.wait()
    codes.append(os.waitstatus_to_exitcode(status))
    if codes[-1]:
        [rank.kill() for rank in ranks]
sys.exit(max(map(abs, codes)))
"""


def adapter_repository(root: Path, template: str = "", **spec: Any) -> Path:
    """Make the repository of a `pytorch` engine with the adapter `tiny-sql`, and return its path."""
    checkpoint = write_checkpoint(root / "checkpoint", "llama")
    if template:
        (checkpoint / "chat_template.jinja").write_text(template)
    options = {"adapters": {"tiny-sql": str(write_adapter(root / "adapter"))}, **spec.pop("options", {})}
    build(BuildSpec(str(checkpoint), root / "engine", "pytorch", "tiny", max_batch_size=8, options=options, **spec))
    generate_repository(read_engines([str(root / "engine")]), root / "repository")
    return root / "repository"


def install_library(repository: Path, version: str) -> Path:
    """Install the stand-in of the LLM API as `version` for the engine model, and return the repository."""
    library = repository / "tiny-tensorrt_llm" / "1" / "tensorrt_llm"
    (library / "llmapi").mkdir(parents=True)
    shutil.copyfile(HERE / "standin.py", library / "__init__.py")
    (library / "VERSION").write_text(version)
    for name in ("executor", "llmapi/__init__", "llmapi/llm_args"):
        (library / f"{name}.py").write_text("from tensorrt_llm import *\n")
    return repository


def install_executor(folder: Path) -> None:
    """Install the stand-in of the executor's bindings in `folder`, the engine model's."""
    (folder / "tensorrt_llm" / "bindings").mkdir(parents=True)
    for package in ("tensorrt_llm", "tensorrt_llm/bindings"):
        (folder / package / "__init__.py").touch()
    shutil.copyfile(HERE / "standin_executor.py", folder / "tensorrt_llm" / "bindings" / "executor.py")
