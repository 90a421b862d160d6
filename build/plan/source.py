"""Where a model's config.json comes from: a file, a folder, AIConfigurator's collection, or the Hugging Face hub."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from llmops.build.checkpoint import open_checkpoint
from llmops.build.checkpoint.bundled import BUNDLED
from llmops.build.plan.timing.silicon import package_root
from llmops.errors import CheckpointError


def load_config(source: str) -> dict[str, Any]:
    """The config of a path (config.json, its folder or a GGUF file), of a bundled model, or of a hub id such as
    meta-llama/Llama-3.1-70B. Raises CheckpointError when there is none."""
    path = Path(source).expanduser()
    if path.suffix == ".gguf" or (source in BUNDLED and not path.exists()):
        return open_checkpoint(source, weights=False).config
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise CheckpointError(
                f"{source} has no config.json; name a Hugging Face checkpoint folder or its config.json."
            )
    if path.is_file():
        return _read(path)
    if source.endswith(".json") or source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise CheckpointError(
            f"{source} does not exist; name a config.json, a checkpoint folder, a GGUF file, a hub id (owner/model) "
            f"or {' or '.join(BUNDLED)}."
        )
    known = _collected(source)
    return _read(known) if known else _from_hub(source)


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON ({error}); take the config.json of the checkpoint."
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} does not hold a JSON object; take the config.json of the checkpoint.")
    return config


def _collected(hub_id: str) -> Path | None:
    """The file among AIConfigurator's model configs; Meta's older ids say `Meta-Llama`, fine-tunes share the shapes."""
    root = package_root()
    if root is None:
        return None
    owner, name = hub_id.split("/")
    base = name.removesuffix("-Instruct")
    for spelling in (name, base, f"Meta-{base}", base.replace("Llama-3.3", "Meta-Llama-3.1")):
        path = root / "model_configs" / f"{owner}--{spelling}_config.json"
        if path.is_file():
            return path
    return None


def _from_hub(hub_id: str) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return _read(Path(hf_hub_download(hub_id, "config.json", local_files_only=_offline())))
    except GatedRepoError as error:
        raise CheckpointError(f"{hub_id} is gated: accept its licence on the hub and set HF_TOKEN.") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"the hub has no model {hub_id} (or it is private: set HF_TOKEN).") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"the config of {hub_id} could not be fetched from the Hugging Face hub; check the network, or download "
            "config.json elsewhere and give its path."
        ) from error


def _offline() -> bool:
    """Whether the hub's name does not even resolve: its client would try for half a minute."""
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
