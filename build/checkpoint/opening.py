"""Open the path or name that the user typed as a `Checkpoint`.

The text is tried as a folder, a GGUF file, a bundled name and a hub id, in this order.
"""

import difflib
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmops.build.checkpoint.description import Checkpoint, SpecialTokens
from llmops.build.checkpoint.file_checks import reject_odd_settings, reject_outside_symlinks
from llmops.build.checkpoint.huggingface_folder import detect_quantisation, open_folder
from llmops.build.checkpoint.known_models import BUNDLED, BUNDLED_GENERATION, bundled_path, known_model
from llmops.build.model.architecture import Architecture
from llmops.errors import CheckpointError


def open_checkpoint(ref: str, weights: bool = True) -> Checkpoint:
    """Describe a checkpoint without loading a weight.

    Args:
        ref: A path, the name of a bundled model or a hub id.
        weights: False for planning: a folder with only config.json is accepted, a known hub id is
            described from the table that ships with llmops, and for any other hub id only the small
            files are fetched.

    Raises:
        CheckpointError: `ref` is not a checkpoint, or the checkpoint is damaged or not supported.
        MissingDependencyError: The package of a bundled model is not installed.
        ResourceError: The hub cannot be reached.
    """
    path = Path(ref).expanduser()
    if path.exists():
        with reject_odd_settings(ref):
            return _open_path(path, ref, weights)
    if ref in BUNDLED:
        bundled = _open_path(bundled_path(ref), ref, weights)
        return replace(bundled, name=ref, generation_config=BUNDLED_GENERATION.get(ref, {}))
    return _open_hub(ref, weights)


def _open_path(path: Path, ref: str, weights: bool) -> Checkpoint:
    from llmops.build.checkpoint.gguf_header import is_gguf

    if path.name == "config.json" and path.is_file():
        path = path.parent
    if path.is_file():
        if not is_gguf(path):
            raise CheckpointError(_not_a_checkpoint(path, "the file is not a GGUF file"))
        from llmops.build.checkpoint.gguf_checkpoint import open_gguf

        return open_gguf(path, ref)
    if (path / "config.json").is_file():
        return open_folder(path, ref, weights)
    return _open_only_gguf(path, ref, weights)


def _open_only_gguf(folder: Path, ref: str, weights: bool) -> Checkpoint:
    reject_outside_symlinks(folder)
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return _open_path(files[0], ref, weights)
    if files:
        raise CheckpointError(f"{folder} holds {len(files)} GGUF files; give one of them, for example {files[0]}.")
    raise CheckpointError(_not_a_checkpoint(folder, "it has no config.json"))


def _not_a_checkpoint(path: Path, reason: str) -> str:
    near = difflib.get_close_matches(path.name, BUNDLED, n=1)
    if near:
        return f"{path} is not a checkpoint ({reason}); did you mean the bundled model {near[0]}?"
    return (
        f"{path} is not a checkpoint ({reason}); give a Hugging Face folder (config.json, *.safetensors, "
        f"tokenizer.json), a GGUF file, a hub id like meta-llama/Llama-3.1-8B-Instruct, or {' or '.join(BUNDLED)}."
    )


def _open_hub(ref: str, weights: bool) -> Checkpoint:
    from llmops.build.checkpoint.hub_download import HUB_ID, fetch_snapshot

    if ref.startswith(("http://", "https://")):
        hub_id = "/".join(ref.split("/")[3:5])
        raise CheckpointError(f"{ref} is a URL, which is not downloaded; give the hub id, here perhaps {hub_id}.")
    match = HUB_ID.fullmatch(ref)
    if match is None or ref.endswith((".gguf", ".safetensors")):
        raise CheckpointError(_not_a_checkpoint(Path(ref), "there is no such file or folder"))
    known = known_model(ref)
    if known and not weights:
        return describe_config(known.id, known.config, Path(known.id))
    snapshot = fetch_snapshot(ref, weights)
    with reject_odd_settings(ref):
        checkpoint = _open_path(snapshot, ref, weights)
    return replace(checkpoint, name=match["repo"].split("/")[1].lower())


def describe_config(ref: str, config: dict[str, Any], folder: Path) -> Checkpoint:
    """Return the checkpoint that a config.json alone describes.

    `folder` is the checkpoint's path, which need not exist.
    """
    return Checkpoint(
        ref=ref,
        path=folder,
        format="huggingface",
        config=config,
        architecture=Architecture.from_hf_config(config),
        tensors={},
        files=(),
        weight_files=(),
        tokenizer_files=(),
        special_tokens=SpecialTokens(None, (), None),
        name=folder.name.lower(),
        quantisation=detect_quantisation(folder, config),
    )
