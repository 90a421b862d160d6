"""The code of the models that run inside Triton, as `llmops repo` writes it: beside the modules that it shares."""

import atexit
import functools
import shutil
import sys
import tempfile
from pathlib import Path

from llmops.model_repository.generate import copy_model_code


@functools.cache
def version_folder(package: str) -> Path:
    """Return the folder that Triton's stub has on its path for a model of `package`.

    It is written once per process.
    """
    root = tempfile.mkdtemp(prefix=f"llmops-{package}-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    copy_model_code(package, Path(root, "1"))
    return Path(root, "1")


def put_on_path(*packages: str) -> None:
    """Make the model code of `packages`, and a stand-in for Triton's own module, importable in this process."""
    for folder in (*map(version_folder, packages), Path(__file__).with_name("triton_stub")):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
