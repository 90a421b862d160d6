"""Hub ids: the snapshot in the local cache, or a download where there is a network."""

from __future__ import annotations

import re
from pathlib import Path

from llmops.errors import CheckpointError, ResourceError

# owner/name, optionally @revision
HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_WITHOUT_WEIGHTS = [pattern for pattern in _WANTED if pattern != "*.safetensors"]


def fetch_snapshot(ref: str, weights: bool = True) -> Path:
    """Folder with the files of `owner/name[@revision]`. Raises CheckpointError, or ResourceError when offline."""
    import huggingface_hub
    from huggingface_hub import errors

    match = HUB_ID.fullmatch(ref)
    assert match is not None
    repo, revision = match["repo"], match["revision"]
    try:
        wanted = _WANTED if weights else _WITHOUT_WEIGHTS
        return Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=wanted))
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repo} is gated: accept its licence on huggingface.co, then log in with `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{repo} has no revision {revision!r} on the Hugging Face hub.") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo} is neither a local path nor a model on the Hugging Face hub (or it is private: set HF_TOKEN)."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise ResourceError(_offline(repo)) from error
    except OSError as error:
        raise ResourceError(f"Downloading {repo} failed: {error}.") from error


def _offline(repo: str) -> str:
    return (
        f"{repo} is not a local path, and the Hugging Face hub cannot be reached to download it. Copy the checkpoint "
        "here and give its folder, or run `hf download` on a machine with a network and set HF_HOME to that cache."
    )
