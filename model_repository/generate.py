"""The generator of Triton model repositories from engine folders.

A repository has four models per served name, and is checked before it is written.
"""

import hashlib
import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmops import __version__, contract, kv_blocks, process, round_robin
from llmops.build.checkpoint.file_checks import check_file_size
from llmops.build.engine_folder.atomic_folder import (
    STAGING_SUFFIX,
    list_files,
    reject_added_files,
    remove_leftovers,
    replace_folder,
    resolve_output,
)
from llmops.build.engine_folder.build_lock import exclusive_build
from llmops.build.engine_folder.manifest import EngineManifest
from llmops.contract import ENGINE_SUFFIX, POSTPROCESSING_SUFFIX, PREPROCESSING_SUFFIX, Tensor
from llmops.errors import InputError
from llmops.input_files import MAX_TABLE_BYTES, leads_outside
from llmops.model_repository.encoder import encoder_config, encoder_model_name, is_encoder
from llmops.model_repository.gpu_assignment import GpuRequirement, assign_gpus
from llmops.model_repository.repository.manifest import (
    REPOSITORY_FILE,
    SERVED_NAME,
    RepositoryManifest,
    ServedEngine,
    engine_digest,
)
from llmops.model_repository.repository.pbtxt import TEMPLATE_DIR, render_config
from llmops.model_repository.targets import EngineModelConfig, RepositoryTarget, find_target
from llmops.output_files import hidden_sibling

#: Maximum number of batches that wait for one of our engine models. The last request of a full
#: queue waits for about this many answers.
QUEUED_BATCHES = 4
#: The parameter of an engine model's config.pbtxt that names the engine's GPUs.
GPU_IDS = "gpu_device_ids"
#: Modules that models inside Triton share with the gateway, and import as llmops_NAME.
_SHARED_MODULES = {"tensorrt_llm": (contract, round_robin, kv_blocks, process)}


@dataclass(frozen=True)
class EngineEntry:
    """An engine folder that is served under `name`.

    `max_queue_size` is the maximum number of waiting sequences, or None for the default. `gpus` are
    the numbers of the GPUs to use, or empty for the choice of the engine's library.
    """

    name: str
    directory: Path
    manifest: EngineManifest
    target: RepositoryTarget
    max_queue_size: int | None = None
    gpus: tuple[int, ...] = ()

    @property
    def queue_size(self) -> int:
        """The maximum number of sequences that wait, in addition to the running batch."""
        default = QUEUED_BATCHES * self.target.max_sequences(self.manifest)
        return default if self.max_queue_size is None else self.max_queue_size


@dataclass(frozen=True)
class ModelFolder:
    """A Triton model that is ready to be written.

    `package` is the template folder with the model's code, or None for a model without code.
    """

    name: str
    config: str
    package: str | None


def read_engines(
    arguments: Sequence[str],
    max_queue_size: int | None = None,
    gpus: Mapping[str, tuple[int, ...]] | None = None,
    serving: str | Mapping[str, str] = "",
    tenants_apart: bool = False,
) -> list[EngineEntry]:
    """Read engine folders.

    Args:
        arguments: `ENGINE` or `NAME=ENGINE` for each engine.
        max_queue_size: The maximum number of sequences that wait for each engine.
        gpus: The GPU numbers of each engine, by served name.
        serving: The server of all engines, or of each engine by served name; see `find_target`.
        tenants_apart: True if the gateway in front keeps the cached prefixes of tenants apart.

    Raises:
        InputError: An engine cannot be served, or two engines have the same name or GPU.
    """
    entries: list[EngineEntry] = []
    for argument in arguments:
        entry = replace(_read_engine(argument, serving), max_queue_size=max_queue_size)
        if tenants_apart:
            entry = replace(entry, manifest=entry.target.for_tenants_apart(entry.manifest))
        if any(other.name == entry.name for other in entries):
            raise InputError(
                f"Two engines are called {entry.name}; give one of them another name, as in `other={entry.directory}`."
            )
        entries.append(entry)
    _check_adapters(entries)
    assigned = assign_gpus([need for entry in entries for need in _gpu_requirements(entry)], gpus or {})
    return [replace(entry, gpus=assigned.get(entry.name, ())) for entry in entries]


def generate_repository(entries: Sequence[EngineEntry], output: Path) -> list[str]:
    """Write the repository to `output` atomically, replacing an earlier one.

    Return the names of the Triton models.
    """
    output = resolve_output(output)
    _check_output(output)
    folders = [folder for entry in entries for folder in model_folders(entry)]
    scratch = hidden_sibling(output, STAGING_SUFFIX)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_build(output, lambda _: None):
            remove_leftovers(output)
            scratch.mkdir()
            for folder in folders:
                write_model(scratch / folder.name, folder)
            _manifest(entries).save(scratch)
            # replace the whole folder at once, so that a starting Triton never reads an incomplete
            # repository
            replace_folder(scratch, output)
    except OSError as error:
        # an error of copytree has the reasons of its files
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
        raise InputError(f"{output} cannot be written ({reason}); choose another folder.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return [folder.name for folder in folders]


def model_folders(entry: EngineEntry) -> Iterator[ModelFolder]:
    """Yield the four models of a served name, or the one model of an encoder."""
    if is_encoder(entry.manifest):
        config = encoder_config(entry.name, entry.directory, entry.manifest)
        yield ModelFolder(encoder_model_name(entry.name, entry.manifest), config, "embedding")
        return
    model = _engine_model(entry)
    ours = contract.CONTEXT_IDS in model.outputs
    yield ModelFolder(entry.name, _ensemble(entry, ours), None)
    yield ModelFolder(entry.name + PREPROCESSING_SUFFIX, _preprocessing(entry, ours), "preprocessing")
    yield ModelFolder(entry.name + ENGINE_SUFFIX, _engine(entry, model), "tensorrt_llm" if model.python_model else None)
    yield ModelFolder(entry.name + POSTPROCESSING_SUFFIX, _postprocessing(entry), "postprocessing")


def model_metadata(entry: EngineEntry) -> dict[str, Any]:
    """Return the metadata that the engine model announces to gateways; see docs/contract.md."""
    manifest = entry.manifest
    return {
        "contract": contract.CONTRACT_VERSION,
        "name": entry.name,
        "target": manifest.target,
        "tokenizer_dir": _tokenizer_dir(entry),
        "max_batch_size": entry.target.max_sequences(manifest),
        "max_seq_len": entry.target.max_length(manifest),
        "vocab_size": manifest.tokenizer.vocab_size,
        "bos_id": manifest.tokenizer.bos_id,
        "end_ids": manifest.tokenizer.end_ids,
        "pad_id": manifest.tokenizer.pad_id,
        "chat_template": manifest.tokenizer.chat_template,
        "sampling": manifest.sampling.model_dump(exclude_none=True),
        "capabilities": entry.target.capabilities(manifest),
        "adapters": [one.model_dump() for one in manifest.adapters],
        "transports": entry.target.transports(),
        **entry.target.reports(),
        "batch_invariant": entry.target.batch_invariant(manifest),
        "engine": manifest.key,
        "tokenizer": _digest(Path(_tokenizer_dir(entry)) / "tokenizer.json"),
        "template": _digest(Path(_tokenizer_dir(entry)) / "chat_template.jinja"),
        "built": int(time.time()),
    }


def _read_engine(argument: str, serving: str | Mapping[str, str]) -> EngineEntry:
    given_name, equals, path = argument.partition("=")
    directory = Path(path if equals else argument)
    manifest = EngineManifest.load(directory)
    name = given_name if equals else manifest.name
    if not re.fullmatch(SERVED_NAME, name):
        raise InputError(f"{name!r} cannot name a model: use letters, digits, '.', '_' and '-', at most 128 of them.")
    if not manifest.complete:
        raise InputError(f"{directory} is not complete: run `llmops build --resume {directory}` to finish it.")
    tokenizer = directory / manifest.tokenizer.directory
    for part in (tokenizer, directory / manifest.model_dir, *tokenizer.glob("*")):
        if leads_outside(part, directory):
            raise InputError(f"{part} leads out of its engine, which could serve other files; copy it.")
    manifest.check_files(directory)
    for file in ("tokenizer.json", "chat_template.jinja"):
        check_file_size(tokenizer / file, MAX_TABLE_BYTES, "build the engine again")
    if not (tokenizer / "tokenizer.json").is_file():
        raise InputError(f"{directory} is damaged: its tokenizer.json is missing. Build the engine again.")
    target = find_target(manifest.target, serving if isinstance(serving, str) else serving.get(name, ""))
    target.check(directory, manifest)
    return EngineEntry(name, directory.resolve(), manifest, target)


def _engine_model(entry: EngineEntry) -> EngineModelConfig:
    model = entry.target.engine_model(entry.directory, entry.manifest)
    if not entry.gpus:
        return model
    # a parameter of NVIDIA's C++ backend, which our own model reads as well
    return replace(model, parameters={**model.parameters, GPU_IDS: ",".join(map(str, entry.gpus))})


def _gpu_requirements(entry: EngineEntry) -> list[GpuRequirement]:
    """Return the GPUs that a TensorRT-LLM engine needs, or an empty list for any other engine."""
    if is_encoder(entry.manifest) or not entry.manifest.tensorrt_llm:
        return []
    settings = entry.target.engine_model(entry.directory, entry.manifest).parameters.get(GPU_IDS, "")
    if ";" in settings:
        # the engine has several instances, and the user has assigned their GPUs
        return []
    chosen = tuple(int(gpu) for gpu in settings.split(",") if gpu)
    return [GpuRequirement(entry.name, entry.manifest.parallelism.world_size, chosen)]


def _check_adapters(entries: list[EngineEntry]) -> None:
    """Raise InputError if an adapter has the name of another model.

    Each adapter is served as a model under its own name.
    """
    taken = {entry.name for entry in entries}
    for entry in entries:
        for adapter in entry.manifest.adapters:
            if adapter.name in taken:
                raise InputError(
                    f"Adapter {adapter.name} of {entry.directory} has the name of another model: serve one of them "
                    "under another name (NAME=FOLDER), or build with another --adapter NAME."
                )
            taken.add(adapter.name)


def _tokenizer_dir(entry: EngineEntry) -> str:
    return str(entry.directory / entry.manifest.tokenizer.directory)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _engine(entry: EngineEntry, model: EngineModelConfig) -> str:
    queue = {contract.QUEUE_SIZE_PARAMETER: str(entry.queue_size)} if model.python_model else {}
    values = {
        "name": entry.name + ENGINE_SUFFIX,
        "backend": model.backend,
        "max_batch_size": entry.manifest.limits.max_batch_size,
        # NVIDIA's backend passes each request to its executor, whose queue holds a batch until the
        # next step
        "max_queue_size": entry.target.max_sequences(entry.manifest) + entry.queue_size,
        "inputs": model.inputs,
        "outputs": model.outputs,
        "parameters": {**model.parameters, **queue, contract.METADATA_PARAMETER: json.dumps(model_metadata(entry))},
    }
    return render_config("tensorrt_llm", values)


def _preprocessing(entry: EngineEntry, ours: bool) -> str:
    info = entry.manifest.tokenizer
    values = {
        "name": entry.name + PREPROCESSING_SUFFIX,
        "max_batch_size": entry.manifest.limits.max_batch_size,
        "inputs": contract.PREPROCESSING_INPUTS,
        "outputs": [*contract.PREPROCESSING_OUTPUTS, *([contract.PRE_OUT_RETURN_CONTEXT] if ours else [])],
        "parameters": {
            "tokenizer_dir": _tokenizer_dir(entry),
            "add_special_tokens": "true",
            "end_ids": json.dumps(info.end_ids),
            "pad_id": str(info.pad_id if info.pad_id is not None else next(iter(info.end_ids), 0)),
            "vocab_size": str(info.vocab_size),
            "logit_bias": json.dumps(entry.target.capabilities(entry.manifest)["logit_bias"]),
        },
    }
    return render_config("preprocessing", values)


def _postprocessing(entry: EngineEntry) -> str:
    values = {
        "name": entry.name + POSTPROCESSING_SUFFIX,
        "max_batch_size": entry.manifest.limits.max_batch_size,
        "inputs": contract.POSTPROCESSING_INPUTS,
        "outputs": contract.POSTPROCESSING_OUTPUTS,
        "parameters": {"tokenizer_dir": _tokenizer_dir(entry), "skip_special_tokens": "true"},
    }
    return render_config("postprocessing", values)


def _ensemble(entry: EngineEntry, ours: bool) -> str:
    engine_outputs = {contract.OUTPUT_IDS: contract.POST_TOKENS, contract.SEQUENCE_LENGTH: contract.POST_LENGTH}
    engine_inputs = {engine: made for made, engine in contract.PREPROCESSING_TO_ENGINE.items()}
    if ours:
        engine_inputs[contract.RETURN_CONTEXT_IDS] = contract.PRE_OUT_RETURN_CONTEXT
        engine_outputs |= {
            contract.CONTEXT_IDS: contract.POST_CONTEXT_IDS,
            contract.FINISHED: contract.POST_FINISHED,
        }
    passed = ensemble_outputs()
    steps = [
        {
            "model": entry.name + PREPROCESSING_SUFFIX,
            "inputs": {tensor: public for public, tensor in contract.ENSEMBLE_TO_PREPROCESSING.items()},
            "outputs": {made: _inner(made) for made in engine_inputs.values()},
        },
        {
            "model": entry.name + ENGINE_SUFFIX,
            "inputs": {tensor: _inner(made) for tensor, made in engine_inputs.items()}
            | {tensor: public for public, tensor in contract.ENSEMBLE_TO_ENGINE.items()},
            "outputs": {tensor: _inner(read) for tensor, read in engine_outputs.items()}
            | {tensor: tensor.name for tensor in passed},
        },
        {
            "model": entry.name + POSTPROCESSING_SUFFIX,
            "inputs": {read: _inner(read) for read in engine_outputs.values()},
            "outputs": {contract.POST_OUTPUT: contract.TEXT_OUTPUT},
        },
    ]
    values = {
        "name": entry.name,
        "max_batch_size": entry.manifest.limits.max_batch_size,
        "inputs": contract.ENSEMBLE_INPUTS,
        "outputs": [replace(contract.POST_OUTPUT, name=contract.TEXT_OUTPUT), *passed],
        "steps": steps,
    }
    return render_config("ensemble", values)


def _inner(tensor: Tensor) -> str:
    """Return the name that the ensemble gives a tensor between two of its models."""
    return f"_{tensor.name}"


def ensemble_outputs() -> list[Tensor]:
    """Return the engine's outputs that the ensemble returns in addition to the text."""
    hidden = (contract.OUTPUT_IDS, contract.SEQUENCE_LENGTH, contract.CONTEXT_PHASE_PARAMS)
    return [tensor for tensor in contract.ENGINE_OUTPUTS if tensor not in hidden]


def _manifest(entries: Sequence[EngineEntry]) -> RepositoryManifest:
    return RepositoryManifest(__version__, contract.CONTRACT_VERSION, {entry.name: _served(entry) for entry in entries})


def _served(entry: EngineEntry) -> ServedEngine:
    manifest, digest = entry.manifest, engine_digest(entry.directory)
    if is_encoder(manifest):
        return ServedEngine(str(entry.directory), manifest.key, manifest.target, "python", manifest_sha256=digest)
    model = _engine_model(entry)
    return ServedEngine(
        directory=str(entry.directory),
        key=manifest.key,
        target=manifest.target,
        backend=model.backend,
        runtime=model.parameters.get(contract.RUNTIME_PARAMETER, ""),
        tp_size=manifest.parallelism.tp_size,
        pp_size=manifest.parallelism.pp_size,
        tensorrt_llm=manifest.tensorrt_llm,
        gpu_device_ids=model.parameters.get(GPU_IDS, ""),
        manifest_sha256=digest,
    )


def write_model(folder: Path, model: ModelFolder) -> None:
    """Write one Triton model: its config.pbtxt and its version folder."""
    version = folder / "1"
    if model.package is None:
        version.mkdir(parents=True)
    else:
        copy_model_code(model.package, version)
    (folder / "config.pbtxt").write_text(model.config)


def copy_model_code(package: str, version: Path) -> None:
    """Copy a Python model's code into its version folder.

    The modules that the model shares with the gateway are copied, too, because llmops is not
    installed inside Triton.
    """
    shutil.copytree(
        TEMPLATE_DIR / package / "1", version, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
    )
    for module in _SHARED_MODULES.get(package, (contract,)):
        shutil.copyfile(str(module.__file__), version / f"llmops_{module.__name__.rpartition('.')[2]}.py")
    # Triton's interpreter would write byte code, which would count as an edit, and ignores
    # PYTHONDONTWRITEBYTECODE. A file with the name of the byte-code folder prevents it.
    for folder in (version, *(path for path in version.rglob("*") if path.is_dir())):
        (folder / "__pycache__").touch()


def _check_output(output: Path) -> None:
    if not output.exists():
        return
    if not output.is_dir():
        raise InputError(f"{output} is a file; name a folder for the repository.")
    if any(output.iterdir()) and not (output / REPOSITORY_FILE).is_file():
        raise InputError(f"{output} holds other files and is not a repository of llmops; name an empty or new folder.")
    reject_added_files(output, _added_files(output))


def _added_files(repository: Path) -> list[str]:
    """Return the paths that `generate_repository` did not write, in a repository that it replaces."""
    with suppress(InputError):  # a damaged manifest lists no files
        if made := RepositoryManifest.load(repository).files:
            return [path for path in list_files(repository) if path not in {*made, REPOSITORY_FILE}]
    kept = (path for path in sorted(repository.iterdir()) if not (path / "config.pbtxt").is_file())
    return [path.name for path in kept if path.name != REPOSITORY_FILE]
