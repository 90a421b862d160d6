"""The manifest of a model repository, `.llmops-repository.json`.

The manifest names the engines and the libraries that run them.
"""

import grp
import hashlib
import json
import math
import os
import pwd
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from llmops.build.engine_folder.manifest import FILE_NAME as ENGINE_FILE
from llmops.errors import InputError, first_validation_error
from llmops.input_files import read_json
from llmops.untrusted_text import UNSAFE_CHARACTERS, json_texts

REPOSITORY_FILE = ".llmops-repository.json"
#: Maximum size in bytes of a file whose content is compared. The files of a repository are code and
#: configuration; engines are in other folders.
MAX_FILE_BYTES = 64 * 2**20
#: Maximum number of GPUs of one engine, the same as in engine.json.
_Gpus = Annotated[int, Field(ge=1, le=4096)]
#: Pattern of a served name, which becomes a folder, and a word in scripts and manifests.
SERVED_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
#: Characters that join letters or emoji, in paths of many languages.
_JOINERS = re.compile("[\u200c\u200d]")


@dataclass(frozen=True)
class ServedEngine:
    """The engine of one served name.

    `backend` is the name of Triton's backend. `runtime` is the name of our engine runtime, empty
    for NVIDIA's C++ backend. `tensorrt_llm` is the version of TensorRT-LLM, empty for an engine of
    another library. `manifest_sha256` is the SHA-256 of its engine.json, which has the digests of
    its small files and the sizes of its large ones.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    directory: str
    key: str
    target: str
    backend: str
    runtime: str = ""
    tp_size: _Gpus = 1
    pp_size: _Gpus = 1
    tensorrt_llm: str = ""
    gpu_device_ids: str = ""
    manifest_sha256: str = ""

    @property
    def world_size(self) -> int:
        """Return the number of GPUs."""
        return self.tp_size * self.pp_size

    @property
    def is_mpi(self) -> bool:
        """Return True for NVIDIA's C++ backend, which needs one MPI rank per GPU.

        Other backends start their own workers.
        """
        return self.backend == "tensorrtllm"


@dataclass(frozen=True)
class RepositoryManifest:
    """The served names of a repository with their engines.

    The manifest is empty for a repository that llmops did not make. `files` has the SHA-256 of each
    file that `llmops repo` wrote, and the empty folders, by path in the repository. The digests
    reveal edits, but do not stop an attacker, who can write the manifest as well.
    """

    llmops: str = ""
    contract: int = 1
    engines: dict[Annotated[str, Field(pattern=SERVED_NAME)], ServedEngine] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @property
    def uses_gpus(self) -> bool:
        """Return True if an engine runs on TensorRT-LLM."""
        return any(engine.tensorrt_llm for engine in self.engines.values())

    def save(self, repository: Path) -> None:
        """Write the manifest, with the digests of all files that are in the repository now."""
        manifest = replace(self, files=_digests(repository))
        (repository / REPOSITORY_FILE).write_text(json.dumps(asdict(manifest), indent=2) + "\n")

    def edits(self, repository: Path) -> list[str]:
        """Return the paths of files and empty folders that were changed, added or removed."""
        if not self.files:
            return []
        found = _digests(repository, MAX_FILE_BYTES)
        return sorted(path for path in self.files.keys() | found.keys() if self.files.get(path) != found.get(path))

    def changed_engines(self) -> list[str]:
        """Return the paths of engine.json that were changed or removed."""
        folders = {Path(engine.directory): engine.manifest_sha256 for engine in self.engines.values()}
        return [
            str(folder / ENGINE_FILE)
            for folder, digest in folders.items()
            if folder.is_dir() and engine_digest(folder) != digest
        ]

    @classmethod
    def load(cls, repository: Path) -> Self:
        """Read the manifest. Raise InputError if it was edited or written by another version."""
        path = repository / REPOSITORY_FILE
        if not path.is_file():
            return cls()
        try:
            content = read_json(path)
            # Scripts and printed commands hold these texts.
            if any(UNSAFE_CHARACTERS.search(_JOINERS.sub("", text)) for text in json_texts(content, names=True)):
                raise ValueError("it has a control character or an invisible character")
            return TypeAdapter(cls).validate_python(content)
        except (OSError, ValueError) as error:
            reason = first_validation_error(error, "the file") if isinstance(error, ValidationError) else error
            raise InputError(
                f"{path} was written by another version of llmops or edited ({reason}): make the repository again with "
                "`llmops repo`."
            ) from error


def engine_digest(directory: Path) -> str:
    """Return the SHA-256 of an engine's engine.json."""
    return _digest((directory / ENGINE_FILE).resolve(), MAX_FILE_BYTES)


def _digests(repository: Path, max_bytes: float = math.inf) -> dict[str, str]:
    return {str(path.relative_to(repository)): _digest(path, max_bytes) for path in _files(repository)}


def editable_by_others(folder: Path) -> list[str]:
    """Return the files and folders that users other than root and the one of this process may edit.

    These are files and folders that every user or a shared group may write, and those that belong
    to another user. A user who may write or own a folder above the repository or engine `folder`,
    or above the target of a link, can replace it, so these folders are checked as well. Users may
    rename only their own files in a sticky folder. With an access control list, the group's bits of
    a mode are those of all listed users.
    """
    root, given = folder.resolve(), folder.absolute()
    inside = [root, *_files(root, folders=True), *root.glob(REPOSITORY_FILE)]
    targets = {path.resolve() for path in inside if path.is_symlink() and path.exists()}
    targets = {path for path in targets if not path.is_relative_to(root)}
    above = sorted({given, *given.parents, *root.parents, *(up for path in targets for up in path.parents)} - {root})
    found = [(str(path), path, 0) for path in sorted(targets)]
    found += [(str(path.relative_to(root)), path, 0) for path in inside]
    found += [(str(path), path, stat.S_ISVTX) for path in above]
    private = _private_groups()
    shared = stat.S_IWOTH | stat.S_IWGRP
    # skip the mode of links, which is always 0777
    return [
        name
        for name, path, sticky in found
        if (status := path.lstat()).st_uid not in (0, os.geteuid())
        or (
            status.st_mode & (stat.S_IWOTH if status.st_gid in private and not _has_acl(path) else shared)
            and not status.st_mode & sticky
            and not stat.S_ISLNK(status.st_mode)
        )
    ]


def _has_acl(path: Path) -> bool:
    """Return True if an access control list names users or groups beside the owner and the group."""
    with suppress(OSError):
        return bool(os.getxattr(path, "system.posix_acl_access", follow_symlinks=False))
    return False


def _private_groups() -> set[int]:
    """Return the groups of root and of the user of this process alone: with the user's number or name."""
    user = os.geteuid()
    groups = {0, user}
    with suppress(KeyError):
        groups.add(grp.getgrnam(pwd.getpwuid(user).pw_name).gr_gid)
    return groups


def _files(folder: Path, folders: bool = False) -> Iterator[Path]:
    """Yield the paths below a folder: all files except the manifest, and empty folders.

    Args:
        folder: The folder to walk.
        folders: True to yield all folders, not only empty folders.
    """
    for path in sorted(folder.iterdir()):
        if path.name == REPOSITORY_FILE:
            continue
        is_folder = path.is_dir() and not path.is_symlink()
        # report empty folders, because Triton loads the newest version folder, even an empty one
        if not is_folder or folders or not any(path.iterdir()):
            yield path
        if is_folder:
            yield from _files(path, folders)


def _digest(path: Path, max_bytes: float) -> str:
    """Return the SHA-256 of a file, or of the path in a link.

    The target of a link is not read, because the target may be any file. For an empty folder, a
    file of more than `max_bytes` bytes or a pipe, the result is a fixed text instead.
    """
    if path.is_symlink():
        return hashlib.sha256(str(path.readlink()).encode()).hexdigest()
    if path.is_dir():
        return "an empty folder"
    if not path.is_file() or path.stat().st_size > max_bytes:
        # read only regular files of limited size: a pipe would wait for a writer, and a sparse file
        # may have terabytes
        return "not a file of a repository"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
