"""Imports a module with a fault instead of the one in its file: in this process, and in every Python that it starts."""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any

# the file and its source, for `site/sitecustomize.py`
VARIABLE = "LLMOPS_FAULT"


class Changed(SourceFileLoader):
    """The loader of the mutant's source, and the finder that returns it."""

    def __init__(self, file: str, source: str) -> None:
        folders = Path(file).with_suffix("").parts
        super().__init__(".".join(folders if folders[0] == "llmops" else ("llmops", *folders)), file)
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = compile(self.source, self.path, "exec")
        return code

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None


def put_in(file: str, source: str) -> None:
    """Before the module is imported."""
    sys.meta_path.insert(0, Changed(file, source))
    os.environ[VARIABLE] = json.dumps([file, source])
    os.environ["PYTHONPATH"] = str(Path(__file__).with_name("site"))


def inherit() -> None:
    """Put in what the process that started this one has."""
    put_in(*json.loads(os.environ[VARIABLE]))
