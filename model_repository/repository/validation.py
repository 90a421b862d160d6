"""Checks of a model repository before a server starts on it."""

from pathlib import Path
from typing import Any

from llmops.build.engine_folder.manifest import FILE_NAME as ENGINE_FILE
from llmops.build.engine_folder.manifest import EngineManifest
from llmops.errors import InputError
from llmops.input_files import read_bounded
from llmops.model_repository.repository.manifest import RepositoryManifest, editable_by_others
from llmops.model_repository.repository.pbtxt import parse_config

#: Maximum size in bytes of a config.pbtxt. `llmops repo` writes a few kilobytes; a larger file
#: could fill the memory.
MAX_PBTXT_BYTES = 2**20


def check_repository(repository: Path) -> dict[str, Any]:
    """Return the `ModelConfig` of each model by name.

    Raise InputError with the file and its problem.
    """
    if not repository.is_dir():
        raise InputError(
            f"{repository} is not a model repository: there is no such folder. Make one with `llmops repo`."
        )
    if (repository / ENGINE_FILE).is_file():
        raise InputError(
            f"{repository} is an engine, not a model repository: `llmops repo {repository} -o REPOSITORY` makes one."
        )
    if not any(repository.glob("*/config.pbtxt")):
        raise InputError(
            f"{repository} is not a model repository: no folder in it has a config.pbtxt. Make one with `llmops repo`."
        )
    models = {}
    for folder in sorted(p for p in repository.iterdir() if p.is_dir() and not p.name.startswith(".")):
        models[folder.name] = _check_model(folder)
    if not models:
        raise InputError(f"{repository} is not a model repository: it has no models. Make one with `llmops repo`.")
    return models


def check_unedited(repository: Path, manifest: RepositoryManifest, strict: bool) -> str:
    """Return a warning if files were edited since `llmops repo`, or an empty text.

    Raises:
        InputError: `strict` is set, and files of the repository or an engine were edited, or other
            users may edit them, or llmops did not make the repository.
    """
    engines = _engines(manifest) if strict else {}
    for folder in (repository, *_engine_folders(engines)) if strict else ():
        _check_permissions(folder)
    edits, changed = manifest.edits(repository), manifest.changed_engines()
    added = [] if edits or changed else _added_to_engines(engines or _engines(manifest))
    if added:
        problem = f"The build of the engine did not write {_shown(added)}, which its server may load"
        advice = "remove it"
    elif edits:
        problem = f"{repository} was edited since `llmops repo` made it: {_shown(edits)}. A repository is a program"
        advice = "make it again with `llmops repo`"
    elif changed:
        problem = f"{_shown(changed)} changed since `llmops repo` read it"
        advice = "if `llmops build` or `upgrade` changed it, make the repository again with `llmops repo`"
    elif not manifest.files:
        if not strict:
            return ""
        problem = f"{repository} was not made by this `llmops repo`, so its files cannot be checked"
        advice = "make it again with `llmops repo`"
    else:
        return ""
    if strict:
        raise InputError(f"{problem}; {advice}, or leave out --strict.")
    return f"{problem}; `--strict` refuses it."


def _check_permissions(folder: Path) -> None:
    if open_paths := editable_by_others(folder):
        raise InputError(
            f"{folder} can be edited by other users of this machine: {_shown(open_paths)} is writable by "
            "others or by a group, or belongs to neither root nor the user who runs llmops. Use `chmod go-w` or "
            "`chown`, or leave out --strict."
        )


def _engine_folders(engines: dict[Path, EngineManifest]) -> list[Path]:
    """Return the folders of the engines, and those of models and tokenizers that are links."""
    parts = [at / part for at, engine in engines.items() for part in (engine.model_dir, engine.tokenizer.directory)]
    return [*engines, *(part for part in parts if part.is_symlink() and part.is_dir())]


def _added_to_engines(engines: dict[Path, EngineManifest]) -> list[str]:
    return [str(path) for folder, engine in engines.items() for path in engine.added_files(folder)]


def _engines(manifest: RepositoryManifest) -> dict[Path, EngineManifest]:
    folders = [Path(engine.directory) for engine in manifest.engines.values()]
    return {folder: EngineManifest.load(folder) for folder in folders if (folder / ENGINE_FILE).is_file()}


def _shown(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _check_model(folder: Path) -> Any:
    path = folder / "config.pbtxt"
    if not path.is_file():
        raise InputError(f"{folder} is not a Triton model: it has no config.pbtxt. Make the repository again.")
    try:
        text = read_bounded(path, MAX_PBTXT_BYTES).decode(errors="replace")
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}). Make the repository again.") from error
    config = parse_config(text, str(path))
    if config.name and config.name != folder.name:
        raise InputError(
            f'{path} has name: "{config.name}", but the folder is {folder.name}: make the repository again.'
        )
    if not any(child.is_dir() and child.name.isdigit() for child in folder.iterdir()):
        raise InputError(
            f"{folder} has no version folder (1/), because the repository was edited; make it again with `llmops repo`."
        )
    if config.backend == "python" and not any(folder.glob("*/model.py")):
        raise InputError(
            f"{folder}/1/model.py is missing, because the repository was edited; make it again with `llmops repo`."
        )
    return config
