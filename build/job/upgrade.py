"""Upgrade an engine to another TensorRT-LLM release.

An upgrade is planned first: the plan lists changes and losses, and writes no file.
"""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from llmops.build.engine_folder.atomic_folder import write_text_atomically
from llmops.build.engine_folder.build_lock import exclusive_build
from llmops.build.engine_folder.manifest import FILE_NAME, EngineManifest
from llmops.build.engine_folder.manifest_extras import PytorchExtra
from llmops.build.quant_formats import buildable_formats, removal_reason
from llmops.build.target_facts import TARGETS
from llmops.build.targets.pytorch import ARGS_FILE
from llmops.build.trtllm.container_images import TrtllmImage
from llmops.build.trtllm.image_selection import image_for, release_of
from llmops.build.trtllm.llm_args import FieldError, arguments_for_release, release_neutral
from llmops.build.trtllm.release_profiles import CHECKED, profile_of_release
from llmops.errors import InputError, VersionMismatchError

#: Required fields -> the group that requires the field. An upgrade to a release that rejects the
#: field removes the whole group.
_WHOLE = {"speculative_config.decoding_type": "speculative_config"}


@dataclass(frozen=True)
class Upgrade:
    """The engine after an upgrade.

    Each list has sentences: `changes` of arguments that keep the behaviour, `lost` behaviour, and
    `gained` abilities.
    """

    manifest: EngineManifest
    image: TrtllmImage
    changes: list[str]
    lost: list[str]
    gained: list[str]


def plan_upgrade(directory: Path, to: str) -> Upgrade:
    """Compute an upgrade without changing files.

    Raises:
        InputError: The engine must be rebuilt. The message has the build command.
        VersionMismatchError: llmops does not know the release.
    """
    manifest = EngineManifest.load(directory)
    version = _known(to)
    if TARGETS[manifest.target].library != "tensorrt_llm":
        raise InputError(
            f"{directory} has target {manifest.target}, which does not use TensorRT-LLM: nothing needs an upgrade."
        )
    if manifest.target == "tensorrt":
        raise InputError(
            f"{directory} is a TensorRT engine: it runs on TensorRT-LLM {manifest.tensorrt_llm} only, and 1.3 "
            f"no longer has engines. Build the model again for the PyTorch backend:\n  "
            f"{_rebuild_command(manifest, directory)}"
        )
    if removed := removal_reason(manifest.quantisation.weights, release_of(version)):
        raise InputError(
            f"{directory} has {removed} weights, which TensorRT-LLM 1.3 does not load. Build it again:\n"
            f"  {_rebuild_command(manifest, directory)}"
        )
    try:
        return _upgraded(manifest, version)
    except VersionMismatchError:
        raise
    except InputError as error:
        raise InputError(f"{error.message} Build it again:\n  {_rebuild_command(manifest, directory)}") from error


def apply_upgrade(directory: Path, to: str, say: Callable[[str], None]) -> Upgrade:
    """Rewrite an engine for another release, under the build lock of its folder.

    engine.json is written last, so that a crash leaves the old engine. `say` receives a sentence if
    another build holds the lock. `plan_upgrade` describes the errors.
    """
    plan_upgrade(directory, to)
    with exclusive_build(directory, say, inside=True):
        upgrade = plan_upgrade(directory, to)
        arguments = json.dumps(upgrade.manifest.extra_as(PytorchExtra).llm_args, indent=2) + "\n"
        write_text_atomically(directory / ARGS_FILE, arguments)
        write_text_atomically(directory / FILE_NAME, upgrade.manifest.text())
    return upgrade


def _known(to: str) -> str:
    minor = release_of(to)
    if minor not in CHECKED:
        known = ", ".join(CHECKED.values())
        raise VersionMismatchError(f"--to {to} is not a release whose LLM API llmops knows; give one of {known}.")
    return CHECKED[minor] if to.count(".") < 2 else to


def _upgraded(manifest: EngineManifest, version: str) -> Upgrade:
    built = manifest.extra_as(PytorchExtra)
    old_version, old = built.tensorrt_llm, release_neutral(built.llm_args)
    kept, lost = _without_lost(old, release_of(version))
    before, after = profile_of_release(old, old_version), profile_of_release(kept, version)
    unset, newly = before.wishes.items() - after.wishes.items(), after.wishes.items() - before.wishes.items()
    changes = [
        *_differences(
            arguments_for_release(old, release_of(old_version)), arguments_for_release(kept, release_of(version)), lost
        ),
        *(f"{name} = {value} is no longer set at start" for name, value in unset),
        *(f"{name} = {value} is set at start" for name, value in newly),
    ]
    names = [field.name for field in fields(before.sampling)]
    support = {name: (getattr(before.sampling, name), getattr(after.sampling, name)) for name in names}
    image = image_for("pytorch", version)
    extra = built.model_copy(update={"tensorrt_llm": version, "image": image.serving("pytorch"), "llm_args": kept})
    return Upgrade(
        manifest.model_copy(update={"extra": extra}),
        image,
        changes,
        [
            *lost.values(),
            *(f"requests with {name} will be refused" for name, (a, b) in support.items() if a and not b),
        ],
        [f"requests with {name}" for name, (a, b) in support.items() if b and not a],
    )


def _without_lost(arguments: Mapping[str, Any], minor: tuple[int, int]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments that a release accepts, and the reason for each removed field."""
    kept: dict[str, Any] = json.loads(json.dumps(arguments))
    lost: dict[str, str] = {}
    while True:
        try:
            arguments_for_release(kept, minor)
        except FieldError as error:
            path = _WHOLE.get(error.path, error.path)
            *parents, last = path.split(".")
            holder = kept
            for parent in parents:
                holder = holder[parent]
            value = holder.pop(last)
            lost[path] = f"{path} = {json.dumps(value)}: {error.message.removesuffix(', or leave it out.')}"
        else:
            return kept, lost


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], lost: Mapping[str, str]) -> Iterator[str]:
    before, after = dict(_flat(old)), dict(_flat(new))
    for name in [*before, *(name for name in after if name not in before)]:
        if _is_lost(name, lost) or before.get(name) == after.get(name):
            continue
        if name not in after:
            yield (f"{name} = {json.dumps(before[name])} is left out: the release behaves the same without this field")
        elif name not in before:
            yield f"{name} = {json.dumps(after[name])} is set"
        else:
            yield f"{name}: {json.dumps(before[name])} becomes {json.dumps(after[name])}"


def _is_lost(name: str, lost: Mapping[str, str]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in lost)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _rebuild_command(manifest: EngineManifest, directory: Path) -> str:
    """Return the shell command that builds the same model for the PyTorch backend."""
    quant = manifest.quantisation.weights
    quant_format = buildable_formats("pytorch").get(quant)
    if quant_format is None or quant_format.removal:
        quant = "fp8"
    cache, parallel, limits = manifest.quantisation.kv_cache, manifest.parallelism, manifest.limits
    words = [
        f"llmops build {shlex.quote(manifest.source.checkpoint)} -o {shlex.quote(f'{directory}-1.3')}",
        f"--target pytorch --set image=trtllm-1.3 --quant {quant} --tp {parallel.tp_size} --pp {parallel.pp_size}",
        f"--max-batch-size {limits.max_batch_size} --max-seq-len {limits.max_seq_len}",
    ]
    return " ".join([*words, *([f"--kv-cache {cache}"] if cache == "fp8" else [])])
