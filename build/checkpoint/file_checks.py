"""Check untrusted files: their JSON, their links and the ranges of their tensors.

Every fault becomes a CheckpointError that names the file.
"""

import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from llmops.build.checkpoint.description import FileState, FileStatus, TensorInfo
from llmops.build.checkpoint.hashing import sha256_of
from llmops.errors import CheckpointError
from llmops.input_files import MALFORMED, MAX_CONFIG_BYTES, leads_outside, lies_outside, parse_json, read_opened
from llmops.untrusted_text import json_texts

#: Maximum number of different texts in one settings file. Each text is looked up on disk.
MAX_TEXTS = 1 << 17

#: Maximum number of files and folders in a checkpoint. The largest known have about 1,500, and a
#: clone with Git and the records of a download have several for each.
_MAX_FILES = 1 << 14

#: Maximum number of levels of folders in a checkpoint. Each file's path is resolved level by level.
_MAX_LEVELS = 16

#: Maximum product of the sizes of a tensor that are not zero. A larger product overflows in NumPy,
#: also for a tensor without values.
_MAX_PRODUCT = 1 << 59

#: Fields that make transformers read weights, a config.json or a tokenizer.json that were not
#: checked.
_OTHER_FILES = frozenset({"transformers_weights", "configuration_files", "fast_tokenizer_files"})


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        CheckpointError: The file cannot be read as JSON, is too large or does not hold an object.
    """
    content = read_value(path, max_bytes)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object; download it again.")
    return content


def read_value(path: Path, max_bytes: int = MAX_CONFIG_BYTES, folder: Path | None = None) -> Any:
    """Return the JSON value in a file, which `open_checked` opens.

    Raises:
        CheckpointError: The file cannot be read as JSON, or is too large.
    """
    check_file_size(path, max_bytes)
    try:
        with open_checked(path, folder) as file:
            return parse_json(read_opened(file, max_bytes))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download it again.") from error


def open_checked(path: Path, folder: Path | None = None) -> BinaryIO:
    """Open a file, and check that the opened file lies in `folder` or in the hub's blobs.

    A folder or link that was swapped after the check of the links, and is put back before the build
    ends, would lead to another file of this machine.

    Args:
        path: The path of the file, below `folder`.
        folder: The checkpoint's folder. The default is the folder that holds `path`.

    Raises:
        CheckpointError: The opened file lies elsewhere.
        OSError: The file cannot be opened.
    """
    folder = folder or path.parent
    top = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        file = os.fdopen(os.open(path.relative_to(folder), os.O_RDONLY | os.O_NONBLOCK, dir_fd=top), "rb")
        # The kernel knows where an open file lies, whatever its path leads to now.
        if lies_outside(*(Path(os.readlink(f"/proc/self/fd/{handle}")) for handle in (file.fileno(), top))):
            file.close()
            raise CheckpointError(f"{path} was changed while the engine was built; build it again.")
    finally:
        os.close(top)
    return file


def copy_checked(source: Path, target: Path, folder: Path | None = None) -> None:
    """Copy the content of a file that `open_checked` opens."""
    with open_checked(source, folder) as file, target.open("wb") as copy:
        shutil.copyfileobj(file, copy)


@contextmanager
def reject_odd_settings(ref: str) -> Iterator[None]:
    """Convert errors that malformed files cause in the block to a CheckpointError about `ref`."""
    try:
        yield
    except (*MALFORMED, RuntimeError) as error:
        raise CheckpointError(
            f"The settings of {ref} are malformed or do not fit its weights ({type(error).__name__}); download "
            "it again."
        ) from error


def check_file_size(path: Path, max_bytes: int, advice: str = "download it again") -> None:
    """Raise CheckpointError if a file has more than `max_bytes` bytes.

    A sparse file, which takes almost no space on the disk, would fill the memory when read.
    """
    size = path.stat().st_size if path.exists() else 0
    if size > max_bytes:
        raise CheckpointError(f"{path} has {size:,} bytes, and at most {max_bytes:,} are read; {advice}.")


def file_state(path: Path) -> FileState | None:
    """Return the state of a path and of the file behind it, or None if the path leads nowhere."""
    try:
        own, target = _status(path.lstat()), _status(path.stat())
        # `resolve` comes after `stat`, which raises OSError for a loop of links.
        return FileState(own, target, (_status(path.parent.stat()), _status(path.resolve().parent.stat())))
    except OSError:
        return None


def _status(found: os.stat_result) -> FileStatus:
    return FileStatus(found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)


def _differ(path: Path, before: FileState | None, digest: str | None) -> bool:
    """Return True if a file differs from `before` by more than a hard link that was made or removed.

    Other builds of the same checkpoint make hard links to the file in their own folders. A hard
    link changes only `changed`, the time of the inode, as does a program that writes the file and
    sets its time back. The file's SHA-256, which was `digest`, tells one from the other.
    """
    now = file_state(path)
    if before is None or now is None:
        return before is not now
    if (before.path, before.file) == (now.path, now.file):
        return False
    linked = before.folders == now.folders and all(
        old._replace(changed=new.changed) == new
        for old, new in zip((before.path, before.file), (now.path, now.file), strict=True)
    )
    return not linked or digest is None or sha256_of(path) != digest


def reject_changed_files(
    folder: Path, states: Mapping[str, FileState | None], digests: Mapping[str, str | None]
) -> None:
    """Check that files have not changed since their links were checked.

    The check also finds a file that was replaced by a link and put back before the build ended: a
    program cannot set the time at which an inode changed.

    Args:
        folder: The checkpoint's folder.
        states: The result of `reject_outside_symlinks`: the state of each file before its check.
        digests: The SHA-256 of each file to check, by its path in `folder`. None also refuses a
            hard link that was made or removed.

    Raises:
        CheckpointError: A file was changed.
    """
    for name, digest in digests.items():
        if name in states and _differ(folder / name, states[name], digest):
            raise CheckpointError(f"{folder / name} was changed while the engine was built; build it again.")


def reject_outside_symlinks(folder: Path) -> dict[str, FileState | None]:
    """Check that `folder` has only files, and no link out of `folder` except to the hub's blobs.

    A build would copy the target of such a link into the engine, and would wait for ever for a
    pipe.

    Returns:
        The state of each file before the file was checked, by its path in `folder`.

    Raises:
        CheckpointError: A link leads out of the folder, a pipe or a device is in it, or it has too
            many files. The message names the link and not its target.
    """
    real = folder.resolve()
    states: dict[str, FileState | None] = {}
    for root, folders, files in os.walk(real):
        if len(Path(root).relative_to(real).parts) > _MAX_LEVELS:
            raise CheckpointError(
                f"{folder} has more than {_MAX_LEVELS} levels of folders; remove those that are not the model's."
            )
        if len(states) + len(folders) + len(files) > _MAX_FILES:
            raise CheckpointError(
                f"{folder} has more than {_MAX_FILES:,} files; remove those that are not the model's."
            )
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
    """Check that a checkpoint's settings name no file outside its folder, and no unchecked file.

    transformers passes the fields of tokenizer_config.json to the tokenizer, which would read a
    `vocab_file` of any path into the engine's vocabulary. config.json may name other weights.

    Args:
        folder: The checkpoint's folder.
        settings: The content of the checkpoint's JSON files, by file name.

    Raises:
        CheckpointError: A text is the path of a file outside the folder, a field names files that
            were not checked, or a file has more than `MAX_TEXTS` texts. The message names the JSON
            file and not the text.
    """
    for name, content in settings.items():
        texts = set(json_texts(content))
        if len(texts) > MAX_TEXTS:
            raise CheckpointError(
                f"{folder / name} has more than {MAX_TEXTS:,} texts, the most that are checked; download it again."
            )
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
        CheckpointError: A tensor reaches past the end of the file or into another tensor, or has
            sizes that no file can have.
    """
    placed = sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = max((tensor.offset + tensor.nbytes for tensor in placed), default=0)
    if end > size:
        raise CheckpointError(
            f"{path} is truncated: it has {size:,} bytes, its tensors need {end:,}; download it again."
        )
    for tensor in placed:
        if math.prod(filter(None, tensor.shape)) > _MAX_PRODUCT:
            raise CheckpointError(f"{path} is damaged: {tensor.name} has the shape {tensor.shape}; download it again.")
    for before, after in pairwise(placed):
        if before.offset + before.nbytes > after.offset:
            raise CheckpointError(
                f"{path} is damaged: the tensors {before.name} and {after.name} overlap; download it again."
            )
