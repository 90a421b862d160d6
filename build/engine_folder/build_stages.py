"""Finished stages of a build that was stopped: kept next to the output under the hash of what went into them.

`sole_build` keeps other builds for the same output away, so whatever is unfinished here is a dead build's.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmops.build.engine_folder.atomic_folder import sync_tree
from llmops.errors import InputError

_PART = ".part"


def stages_folder(output: Path) -> Path:
    """Hidden, on the same file system as the output, so that files move by hard link."""
    output = output.absolute()
    return output.with_name(f".{output.name}.stages")


def finished_stage(output: Path, name: str, content: dict[str, Any]) -> Path:
    """Where the stage `name` made from `content` lies once it is finished."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return stages_folder(output) / f"{name}-{digest}"


def stage(output: Path, name: str, content: dict[str, Any], make: Callable[[Path], None]) -> tuple[Path, bool]:
    """The folder of a finished stage and whether it was there. `make` fills a folder that appears whole or not.

    The same stage made from something else is given up: at most one of each name is kept.
    """
    done = finished_stage(output, name, content)
    if done.is_dir():
        return done, True
    part = done.with_suffix(_PART)
    part.mkdir(parents=True)
    try:
        make(part)
        sync_tree(part)
        os.rename(part, done)
    finally:
        remove_unfinished_stages(output)
    for other in done.parent.glob(f"{name}-*"):
        if other != done:
            _discard(other)
    return done, False


def remove_unfinished_stages(output: Path) -> None:
    """Remove what is not finished. Raises InputError when the folder is a link: what it leads to is not ours."""
    root = stages_folder(output)
    if root.is_symlink():
        raise InputError(f"{root} is a symbolic link, where a build keeps its stages; remove it.")
    for part in root.glob(f"*{_PART}"):
        shutil.rmtree(part, ignore_errors=True)
    if root.is_dir() and not any(root.iterdir()):
        root.rmdir()


def remove_stages(output: Path) -> None:
    """Called when the engine is in its place."""
    root = stages_folder(output)
    if root.is_dir():
        for folder in (path for path in root.iterdir() if path.is_dir()):
            _discard(folder)
        shutil.rmtree(root, ignore_errors=True)


def _discard(folder: Path) -> None:
    """Under another name first: a kill in between must not leave half a stage that looks finished."""
    part = folder.with_suffix(_PART)
    if folder != part:
        os.rename(folder, part)
    shutil.rmtree(part, ignore_errors=True)


def link_tree(source: Path, target: Path) -> None:
    """Hard-link every file of `source` into `target`; copies where the file system cannot link."""
    shutil.copytree(source, target, copy_function=link_file, dirs_exist_ok=True)


def link_file(source: str | Path, target: str | Path) -> None:
    real = os.path.realpath(source)
    try:
        os.link(real, target)
    except OSError:
        shutil.copy2(real, target)
