"""Find a model's config.json.

The sources are a file, a folder, the table of known models and the Hugging Face hub.
"""

from pathlib import Path
from typing import Any, NamedTuple

from llmops.build.checkpoint import Checkpoint, describe_config, open_checkpoint
from llmops.build.checkpoint.file_checks import read_json
from llmops.build.checkpoint.hub_download import HUB_ID, cached_config, fetch_config
from llmops.build.checkpoint.known_models import BUNDLED, KnownModel, known_model, known_models, model_suggestion
from llmops.errors import CheckpointError
from llmops.untrusted_text import escape_unsafe


class NamedModel(NamedTuple):
    """A model's architecture, read from config.json, and the model's display name."""

    name: str
    checkpoint: Checkpoint


def look_up_model(source: str, online: bool = False) -> NamedModel:
    """Return the model with the name or path `source`.

    Args:
        source: A path (config.json, its folder or a GGUF file), a bundled model, or a hub id such
            as meta-llama/Llama-3.1-70B.
        online: Ask the Hugging Face hub about a hub id, instead of the table of known models.

    Raises:
        CheckpointError: No such model was found, or the model is not supported.
        ResourceError: The hub cannot be reached.
    """
    path = Path(source).expanduser()
    if path.suffix == ".gguf" or (source in BUNDLED and not path.exists()):
        return NamedModel(path.stem if path.suffix else source, open_checkpoint(source, weights=False))
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise CheckpointError(
                f"{source} has no config.json; name a Hugging Face checkpoint folder or its config.json."
            )
    if path.is_file():
        return _look_up_file(path)
    return _look_up_hub_id(source, online)


def _look_up_hub_id(source: str, online: bool) -> NamedModel:
    if source.endswith((".json", ".safetensors")) or not HUB_ID.fullmatch(source):
        raise CheckpointError(_unknown_model(source))
    if online:
        return NamedModel(source, _described(source, fetch_config(source)))
    known = known_model(source)
    if known:
        return NamedModel(known.id, describe_config(known.id, _decoder_config(known), Path(known.id)))
    cached = cached_config(source)
    if cached:
        return NamedModel(source, _described(source, cached))
    raise CheckpointError(
        f"{source} is not among the {len(known_models())} models whose shapes ship with llmops; give --online to ask "
        f"the Hugging Face hub, or the path of its config.json{model_suggestion(source) or '.'}"
    )


def _unknown_model(source: str) -> str:
    near = "" if source.startswith((".", "/", "~")) else model_suggestion(source)
    return (
        f"{source} does not exist; name a config.json, a checkpoint folder, a GGUF file, a hub id (owner/model) "
        f"or {' or '.join(BUNDLED)}{near or '.'}"
    )


def _decoder_config(known: KnownModel) -> dict[str, Any]:
    """Return config.json of a known model. Raises CheckpointError for an encoder."""
    if known.hf_class.endswith("ForCausalLM") or known.hf_class.endswith("ForConditionalGeneration"):
        return known.config
    size = f"{(known.parameters or 0) / 1e6:.0f} million parameters, {(known.parameters or 0) * 2e-9:.2f} GB in FP16"
    raise CheckpointError(
        f"{known.id} is an embedding model ({known.hf_class}, {size}), which fits any GPU or CPU and needs no plan; "
        "download it and build its folder."
    )


def _look_up_file(path: Path) -> NamedModel:
    """Return the model of a config.json.

    The model's name is `_name_or_path` of config.json, or else the name of the file or its folder.
    """
    checkpoint = _described(str(path), path)
    saved_name = str(checkpoint.config.get("_name_or_path") or "").strip("/").split("/")[-1]
    name = saved_name or (path.stem if path.stem != "config" else path.resolve().parent.name)
    return NamedModel(escape_unsafe(name), checkpoint)


def _described(ref: str, path: Path) -> Checkpoint:
    return describe_config(ref, read_json(path.resolve()), path.parent)
