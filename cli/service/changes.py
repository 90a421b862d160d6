"""The differences between an llmops.yaml and the present state.

The file is compared with the engines in its folder, and with the models of a running gateway.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llmops.build.engine_folder.manifest import FILE_NAME, EngineManifest
from llmops.cli.service.command_defaults import spec_of
from llmops.cli.service.service_file import LoadedService


class ServiceChange(NamedTuple):
    """A change of a model's property `what` from `old` to `new`.

    None stands for an absent property.
    """

    model: str
    what: str
    old: Any
    new: Any

    def __str__(self) -> str:
        if self.old is None:
            return f"+ {self.model}: {self.what} {self.new}"
        if self.new is None:
            return f"- {self.model}: {self.what} {self.old}"
        return f"~ {self.model}: {self.what} {self.old} -> {self.new}"


def engine_changes(loaded: LoadedService) -> Iterator[ServiceChange]:
    """Yield the differences between the built engines and the service file.

    `llmops build -f` would build each engine that is missing or differs from the file. Engines of
    models that the file does not describe are differences too.
    """
    for name in loaded.service.models:
        folder = loaded.engine(name)
        if not (folder / FILE_NAME).is_file():
            yield ServiceChange(name, "engine", None, folder)
            continue
        manifest = EngineManifest.load(folder)
        for what, (old, new) in _compared(manifest, loaded, name).items():
            if new is not None and old != new:
                yield ServiceChange(name, what, old, new)
    built = loaded.folder / "engines"
    for path in sorted(built.glob(f"*/{FILE_NAME}")):
        if path.parent.name not in loaded.service.models:
            yield ServiceChange(path.parent.name, "engine", path.parent, None)


def _compared(manifest: EngineManifest, loaded: LoadedService, name: str) -> dict[str, tuple[Any, Any]]:
    """Return the built and the described value of each field of a build.

    The described value is None if the target decides the value.
    """
    spec, layout, limits = spec_of(loaded, name), manifest.parallelism, manifest.limits
    return {
        "checkpoint": (manifest.source.checkpoint, spec.checkpoint),
        "target": (manifest.target, spec.target),
        "quant": (manifest.quantisation.weights, spec.quant),
        "kv_cache": (manifest.quantisation.kv_cache, None if spec.kv_cache == "auto" else spec.kv_cache),
        "tp": (layout.tp_size, spec.tp),
        "pp": (layout.pp_size, spec.pp),
        "ep": (layout.ep_size, spec.ep),
        "max_batch_size": (limits.max_batch_size, spec.max_batch_size),
        "max_seq_len": (limits.max_seq_len, spec.max_seq_len),
        "max_num_tokens": (limits.max_num_tokens, spec.max_num_tokens),
    }


def served_model_changes(loaded: LoadedService, served: Sequence[str]) -> Iterator[ServiceChange]:
    """Yield the models of the file that a gateway lacks, and its models that are not in the file.

    `served` are the names of the models that the gateway serves.
    """
    models = loaded.service.models
    yield from (ServiceChange(name, "served", None, "by the gateway") for name in models if name not in served)
    yield from (ServiceChange(name, "served", "by the gateway", None) for name in served if name not in models)
