"""The code of the models that run inside Triton, as `llmops repo` writes it: beside the modules that it shares."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from llmops.model_repository.generate import copy_model_code


@functools.cache
def version_folder(package: str) -> Path:
    """What Triton's stub has on its path for a model of `package`, written once per process."""
    root = tempfile.mkdtemp(prefix=f"llmops-{package}-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    copy_model_code(package, Path(root, "1"))
    return Path(root, "1")
