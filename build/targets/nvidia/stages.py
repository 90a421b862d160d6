"""Finished stages of a build that was killed: kept next to the output under the hash of what went into them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmops.build.atomic import sync_tree


def stages_folder(output: Path) -> Path:
    """Hidden, on the same file system as the output, so that files move by hard link."""
    output = output.absolute()
    return output.with_name(f".{output.name}.stages")


def stage_key(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:24]


def stage(output: Path, name: str, content: dict[str, Any], make: Callable[[Path], None]) -> tuple[Path, bool]:
    """The folder of a finished stage and whether it was there. `make` fills a folder that appears whole or not."""
    root = stages_folder(output)
    done = root / f"{name}-{stage_key(content)}"
    if done.is_dir():
        return done, True
    part = done.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        make(part)
        sync_tree(part)
        os.rename(part, done)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        if not any(root.iterdir()):
            root.rmdir()
        raise
    return done, False


def link_tree(source: Path, target: Path) -> None:
    """Hard-link every file of `source` into `target`; copies where the file system cannot link."""
    shutil.copytree(source, target, copy_function=link_file, dirs_exist_ok=True)


def link_file(source: str | Path, target: str | Path) -> None:
    real = os.path.realpath(source)
    try:
        os.link(real, target)
    except OSError:
        shutil.copy2(real, target)


def drop_stages(output: Path) -> None:
    """Called when the engine is in its place."""
    shutil.rmtree(stages_folder(output), ignore_errors=True)
