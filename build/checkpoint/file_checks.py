"""Checks of untrusted files: JSON errors, links that lead outside, tensor ranges.

Every fault becomes a CheckpointError that names the file.
"""

import os
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from llmops.build.checkpoint.description import FileState, FileStatus, TensorInfo
from llmops.errors import CheckpointError
from llmops.input_files import MAX_CONFIG_BYTES, leads_outside, parse_json
from llmops.untrusted_text import json_texts

#: Different texts in a checkpoint's settings, each of which is looked up on disk.
MAX_TEXTS = 1 << 17

#: Fields by which transformers reads other weights, another config.json or another tokenizer.json
#: than those that were checked.
_OTHER_FILES = frozenset({"transformers_weights", "configuration_files", "fast_tokenizer_files"})


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        CheckpointError: The file cannot be read, is too large or holds another kind of value.
    """
    content = read_value(path, max_bytes)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object; download it again.")
    return content


def read_value(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> Any:
    """Return the JSON value in a file.

    Raises:
        CheckpointError: The file cannot be read, or is too large.
    """
    check_file_size(path, max_bytes)
    try:
        return parse_json(path.read_bytes())
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download it again.") from error


def check_file_size(path: Path, max_bytes: int) -> None:
    """Raise CheckpointError if a file is larger: one with a hole takes no disk, and much memory."""
    size = path.stat().st_size if path.exists() else 0
    if size > max_bytes:
        raise CheckpointError(
            f"{path} has {size:,} bytes, and {max_bytes:,} are the most that such a file has; download it again."
        )


def file_state(path: Path) -> FileState | None:
    """Return the state of a file and of a link to it, or None if the path leads nowhere."""
    try:
        own, target = _status(path.lstat()), _status(path.stat())
        # after stat, which refuses a loop of links by an OSError
        return FileState(own, target, (_status(path.parent.stat()), _status(path.resolve().parent.stat())))
    except OSError:
        return None


def _status(found: os.stat_result) -> FileStatus:
    return FileStatus(found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)


def _differ(before: FileState | None, now: FileState | None) -> bool:
    """Return True unless the states are the same, or a hard link to the file was made or removed.

    Builds of the same checkpoint make them, in folders of their own. They change the time of the
    inode alone.
    """
    if before is None or now is None:
        return before is not now
    if (before.path, before.file) == (now.path, now.file):
        return False
    return before.folders != now.folders or any(
        old._replace(changed=new.changed) != new
        for old, new in zip((before.path, before.file), (now.path, now.file), strict=True)
    )


def reject_changed_files(folder: Path, states: Mapping[str, FileState | None], names: Iterable[str]) -> None:
    """Check that files are as they were when their links were checked.

    A file that is replaced by a link after that check, and back before the build ends, has another
    state: no program can choose the time of an inode's change.

    Raises:
        CheckpointError: A file was changed.
    """
    for name in names:
        if name in states and _differ(states[name], file_state(folder / name)):
            raise CheckpointError(f"{folder / name} was changed while the engine was built; build it again.")


def reject_outside_symlinks(folder: Path) -> dict[str, FileState | None]:
    """Check that `folder` has only files, and no link out of it except to the hub's blobs.

    A build would copy the files that a link leads to into the engine, and wait for ever for a pipe.

    Returns:
        The state of each file before it was checked, by its path in `folder`.

    Raises:
        CheckpointError: A link leads out of the folder, or a pipe or a device is in it. The message
            names the link and not its target.
    """
    real = folder.resolve()
    states = {}
    for root, folders, files in os.walk(real):
        for name in (*folders, *files):
            path = Path(root, name)
            states[str(path.relative_to(real))] = file_state(path)
            if path.is_symlink() and leads_outside(path, real):
                raise CheckpointError(
                    f"{folder} has a link {path.relative_to(real)} that leads out of the folder, so a build would read "
                    "another file of this machine. Copy the file there if it belongs to the checkpoint."
                )
            if path.exists() and not (path.is_file() or path.is_dir()):
                raise CheckpointError(
                    f"{folder} has {path.relative_to(real)}, which is a pipe or a device and not a file; remove it."
                )
    return states


def reject_named_files(folder: Path, settings: Mapping[str, Any]) -> None:
    """Check that no text in a checkpoint's settings names a file outside its folder, or unread ones.

    transformers passes what tokenizer_config.json says to the tokenizer, which reads a `vocab_file`
    of any path into the engine's vocabulary, and config.json may name other weights.

    Args:
        folder: The checkpoint's folder.
        settings: The content of its JSON files, by file name.

    Raises:
        CheckpointError: A text is the path of such a file, a field names files that were not
            checked, or there are too many texts. The message names the JSON file alone.
    """
    for name, content in settings.items():
        texts = set(json_texts(content))
        if len(texts) > MAX_TEXTS:
            raise CheckpointError(f"{folder / name} has more than {MAX_TEXTS:,} texts; download it again.")
        for text in texts:
            for path in (Path(text), folder / text):
                if os.path.isfile(path) and leads_outside(path, folder):
                    raise CheckpointError(
                        f"{folder / name} names another file of this machine, which would become part of the engine; "
                        "remove that entry."
                    )
        for field in _OTHER_FILES.intersection(json_texts(content, names=True)):
            raise CheckpointError(
                f"{folder / name} has an entry {field}, which makes transformers read files that were not checked; "
                "remove that entry."
            )


def check_tensor_ranges(path: Path, tensors: Iterable[TensorInfo], size: int) -> None:
    """Check that the tensors of a file lie within its `size` bytes and do not overlap.

    Raises:
        CheckpointError: A tensor reaches past the end of the file or into another tensor.
    """
    placed = sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = max((tensor.offset + tensor.nbytes for tensor in placed), default=0)
    if end > size:
        raise CheckpointError(
            f"{path} is truncated: it has {size:,} bytes, its tensors need {end:,}; download it again."
        )
    for before, after in pairwise(placed):
        if before.offset + before.nbytes > after.offset:
            raise CheckpointError(
                f"{path} is damaged: {before.name} and {after.name} overlap in it; download it again."
            )
