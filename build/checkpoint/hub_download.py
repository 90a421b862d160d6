"""Find the snapshot of a Hugging Face hub id in the local cache, or download the snapshot."""

import re
import socket
import stat
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TypeVar

from llmops.build.checkpoint.known_models import model_suggestion
from llmops.errors import CheckpointError, ResourceError
from llmops.input_files import MAX_CONFIG_BYTES

#: A hub id: owner/name, optionally with @revision.
HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_FILE_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_WITHOUT_WEIGHTS = [pattern for pattern in _FILE_PATTERNS if pattern != "*.safetensors"]
#: Maximum number of records in the cache of a model: the commits of revisions, and lists of files.
_MAX_RECORDS = 1 << 14
#: Maximum size in bytes of a record, by its folder. A commit has 40 digits.
_RECORD_BYTES = {"refs": 1 << 10, "trees": MAX_CONFIG_BYTES}
#: Names in huggingface_hub's constants of the files that it reads before each request.
_READ_AT_HOME = ("HF_TOKEN_PATH", "HF_STORED_TOKENS_PATH", "AGENT_HARNESSES_PATH")
_Found = TypeVar("_Found")


def fetch_snapshot(ref: str, weights: bool = True) -> Path:
    """Return the folder with the files of `owner/name[@revision]`.

    Raises:
        CheckpointError: The hub has no such model, or this user may not read it.
        ResourceError: The hub cannot be reached, or the download failed.
    """
    import huggingface_hub

    repo, revision = _split(ref)
    patterns = _FILE_PATTERNS if weights else _WITHOUT_WEIGHTS

    def download() -> str:
        return huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=patterns, local_files_only=_unreachable()
        )

    return _in_cache(ref, Path(_call_hub(ref, download)))


def fetch_config(ref: str) -> Path:
    """Return config.json of `owner/name[@revision]`, from the cache or the hub.

    Raises the same errors as `fetch_snapshot`.
    """
    import huggingface_hub

    repo, revision = _split(ref)

    def download() -> str:
        return huggingface_hub.hf_hub_download(repo, "config.json", revision=revision, local_files_only=_unreachable())

    found = Path(_call_hub(ref, download))
    return _in_cache(ref, found.parent) / found.name


def cached_config(ref: str) -> Path | None:
    """Return config.json of a hub id from the local cache, or None. Does not use the network."""
    import huggingface_hub

    repo, revision = _split(ref)
    check_cache(repo)
    found = huggingface_hub.try_to_load_from_cache(repo, "config.json", revision=revision)
    return _in_cache(ref, Path(found).parent) / "config.json" if isinstance(found, str) else None


def _in_cache(ref: str, snapshot: Path) -> Path:
    """Return the folder of a snapshot.

    Raises:
        CheckpointError: The folder is outside the cache: a file of the cache names a revision such
            as `../../..`.
    """
    repo, _ = _split(ref)
    place = ("models--" + repo.replace("/", "--"), "snapshots")
    whole = snapshot.parent.resolve()
    if snapshot.parent.parts[-2:] != place or snapshot.name == ".." or snapshot.resolve().parent != whole:
        raise CheckpointError(
            f"The Hugging Face cache names a folder outside of {repo} as its snapshot; delete {repo} from the cache."
        )
    return snapshot


def check_cache(repo: str, kind: str = "models") -> None:
    """Check the files that huggingface_hub reads to their ends: tokens, commits and lists of files.

    Raises:
        CheckpointError: One is no file, is too large, or leads to another folder.
    """
    from huggingface_hub import constants

    for path in (Path(getattr(constants, name)) for name in _READ_AT_HOME if hasattr(constants, name)):
        if path.exists() and not (path.is_file() and path.stat().st_size <= MAX_CONFIG_BYTES):
            raise CheckpointError(f"{path} is no file or is too large; remove it.")
    folder = Path(constants.HF_HUB_CACHE, f"{kind}--{repo.replace('/', '--')}")
    records = chain.from_iterable(((name, path) for path in (folder / name).rglob("*")) for name in _RECORD_BYTES)
    for number, (name, path) in enumerate(records):
        status = path.lstat()
        small = stat.S_ISREG(status.st_mode) and status.st_size <= _RECORD_BYTES[name]
        leads_away = small and name == "refs" and b"/" in path.read_bytes()
        if number >= _MAX_RECORDS or leads_away or not (small or stat.S_ISDIR(status.st_mode)):
            raise CheckpointError(
                f"The Hugging Face cache names the commits or files of {repo} by a record that is no file, is too "
                f"large or leads to another folder; delete {repo} from the cache."
            )


def _split(ref: str) -> tuple[str, str | None]:
    match = HUB_ID.fullmatch(ref)
    assert match is not None
    return match["repo"], match["revision"]


def _call_hub(ref: str, download: Callable[[], _Found]) -> _Found:
    """Return the result of `download`, with its errors as CheckpointError or ResourceError."""
    from huggingface_hub import errors

    repo, revision = _split(ref)
    check_cache(repo)
    try:
        return download()
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repo} is gated: accept its licence on huggingface.co, then log in with `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{repo} has no revision {revision!r} on the Hugging Face hub; name one that its page lists."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo} is neither a local path nor a model on the Hugging Face hub (or it is private: set HF_TOKEN)"
            f"{model_suggestion(repo) or '.'}"
        ) from error
    except errors.EntryNotFoundError as error:
        if not isinstance(error, errors.LocalEntryNotFoundError):
            raise CheckpointError(f"{repo} has no config.json on the Hugging Face hub; name another model.") from error
        raise ResourceError(_offline(repo)) from error
    except errors.DisabledRepoError as error:
        raise CheckpointError(f"{repo} is disabled on the Hugging Face hub; choose another model.") from error
    # huggingface_hub's errors have no common base, and transfers raise errors of httpx and of the
    # Rust client.
    except Exception as error:
        why = next(iter(str(error).splitlines()), "").rstrip(".:") or type(error).__name__
        raise ResourceError(
            f"Downloading {repo} failed ({why}); run the command again, which keeps what has arrived."
        ) from error


def _offline(repo: str) -> str:
    return (
        f"{repo} is not a local path, and the Hugging Face hub cannot be reached to download it. Copy the checkpoint "
        "here and give its folder, or run `hf download` on a machine with a network and set HF_HOME to that cache."
    )


def _unreachable() -> bool:
    """Return True if the name of the Hugging Face hub does not resolve.

    Without this check, the hub's client would retry for half a minute.
    """
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    if getproxies():
        return False
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return True
    return False
