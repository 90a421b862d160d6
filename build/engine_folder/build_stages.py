"""Store the finished stages of an interrupted build beside the build's output.

The key of a stage is the SHA-256 of the stage's inputs.

The build lock keeps other builds for the same output away, so unfinished stages belong to killed
builds.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmops.build.engine_folder.atomic_folder import reject_put_by_another, sync_tree
from llmops.errors import InputError

_PART = ".part"


def stages_folder(output: Path) -> Path:
    """Return the path of the hidden folder in which a build into `output` keeps finished stages.

    The folder is on the same file system as the output, so that files can be hard-linked.
    """
    output = output.absolute()
    return output.with_name(f".{output.name}.stages")


def finished_stage(output: Path, name: str, inputs: dict[str, Any]) -> Path:
    """Return the path of stage `name` made from `inputs`, even if the stage does not exist."""
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return stages_folder(output) / f"{name}-{digest}"


def stage(output: Path, name: str, inputs: dict[str, Any], make: Callable[[Path], None]) -> tuple[Path, bool]:
    """Return the folder of a finished stage, and True if an earlier build had finished it.

    Args:
        output: The engine folder of the build.
        name: The stage's name. At most one stage of each name is kept.
        inputs: Everything that decides the stage's files, as JSON values.
        make: Fills the folder that it receives as argument. The folder gets its final name when
            `make` has returned.
    """
    done = finished_stage(output, name, inputs)
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
    """Remove the folders of stages that did not finish.

    Raises:
        InputError: The stages folder is a symbolic link, which may lead to unrelated files, or
            another user's.
    """
    root = stages_folder(output)
    reject_put_by_another(root)
    if root.is_symlink():
        raise InputError(
            f"{root} is a symbolic link, and a build keeps its stages in a folder of this name; remove the link."
        )
    for part in root.glob(f"*{_PART}"):
        shutil.rmtree(part, ignore_errors=True)
    if root.is_dir() and not any(root.iterdir()):
        root.rmdir()


def remove_stages(output: Path) -> None:
    """Remove all stages of a build whose engine is in its place."""
    root = stages_folder(output)
    if root.is_dir():
        for folder in (path for path in root.iterdir() if path.is_dir()):
            _discard(folder)
        shutil.rmtree(root, ignore_errors=True)


def _discard(folder: Path) -> None:
    """Remove a stage, and rename its folder first.

    A process that is killed between the two steps leaves no partial stage that looks finished.
    """
    part = folder.with_suffix(_PART)
    if folder != part:
        os.rename(folder, part)
    shutil.rmtree(part, ignore_errors=True)


def link_tree(source: Path, target: Path) -> None:
    """Hard-link every file of `source` into `target`, or copy if the file system cannot link."""
    shutil.copytree(source, target, copy_function=link_file, dirs_exist_ok=True)


def link_file(source: str | Path, target: str | Path) -> None:
    """Hard-link the file behind `source`, or copy if the file system cannot link."""
    with open(source, "rb") as file:
        real = f"/proc/self/fd/{file.fileno()}"
        try:
            # Python lets the system follow a link only with a handle, which an absolute path ignores.
            os.link(real, target, src_dir_fd=file.fileno())
        except OSError:
            shutil.copy2(real, target)
