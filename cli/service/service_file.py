"""The pydantic models and the reader of llmops.yaml.

docs/operate.md has an example. llmops.schema.json is generated from the models.
"""

import copy
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llmops.build.target_facts import TargetName
from llmops.errors import InputError
from llmops.gateway.settings import GatewaySettings, SettingsLayers, SloSettings, explain_settings_error, load_settings
from llmops.yaml_files import read_yaml

#: The file that commands read by default.
FILE = Path("llmops.yaml")


class _ServiceModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class BuildSection(_ServiceModel):
    """The flags of `llmops build`.

    `set` has the values of `--set`. The build target decides absent values.
    """

    target: TargetName = "openvino"
    quant: str | None = None
    kv_cache: str | None = None
    gpu: str | None = None
    tp: Annotated[int, Field(ge=1)] = 1
    pp: Annotated[int, Field(ge=1)] = 1
    ep: Annotated[int, Field(ge=1)] = 1
    max_batch_size: Annotated[int, Field(ge=1)] | None = None
    max_seq_len: Annotated[int, Field(ge=1)] | None = None
    max_num_tokens: Annotated[int, Field(ge=1)] | None = None
    deterministic: bool = False
    set: dict[str, str | int | float | bool] = Field(default_factory=dict)


class TrafficSection(_ServiceModel):
    """The expected load of a service.

    The section has requests/s, mean prompt and answer tokens, and the share of prompt tokens in the
    prefix cache.
    """

    qps: Annotated[float, Field(gt=0)] | None = None
    isl: Annotated[int, Field(ge=1)] | None = None
    osl: Annotated[int, Field(ge=1)] | None = None
    prefix_hit: Annotated[float, Field(ge=0, lt=1)] | None = None


class ModelSection(_ServiceModel):
    """A model of a service.

    `checkpoint` is the argument of `llmops build`. `replicas` is the number of engines, or `auto`
    for a planned number. `serving` is the server of a TensorRT engine, as in `llmops repo
    --serving`.
    """

    checkpoint: str
    build: BuildSection = BuildSection()
    traffic: TrafficSection = TrafficSection()
    slo: SloSettings = SloSettings()
    replicas: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    serving: Literal["llmops", "nvidia"] | None = None


class ServiceFile(_ServiceModel):
    """A service.

    `models` has the models by served name, and `gateway` the gateway's settings (docs/gateway.md).
    `profiles` has changes for other environments. A profile's `build` replaces the whole section;
    all other sections are merged.
    """

    models: Annotated[dict[str, ModelSection], Field(min_length=1)]
    gateway: dict[str, Any] = Field(default_factory=dict)
    profiles: dict[str, dict[str, Any]] = Field(default_factory=dict)


class LoadedService(BaseModel):
    """A service with one profile applied. `layers` are the gateway's settings, without flags."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    file: Path
    service: ServiceFile
    layers: SettingsLayers
    settings: GatewaySettings

    @property
    def folder(self) -> Path:
        """Return the file's folder, in which everything is built."""
        return self.file.parent

    @property
    def repository(self) -> Path:
        """Return the folder of the Triton repository."""
        return self.folder / "repository"

    @property
    def serving(self) -> dict[str, str]:
        """Return the server of each model's TensorRT engine, for models that name one."""
        models = self.service.models.items()
        return {name: one.serving for name, one in models if one.serving and one.build.target == "tensorrt"}

    def engine(self, name: str) -> Path:
        """Return the engine folder of a model."""
        return self.folder / "engines" / name


def read(file: Path, profile: str | None = None) -> LoadedService:
    """Read a service file.

    Args:
        file: The path of the file.
        profile: Name of the profile to apply, or None.

    Raises:
        InputError: The file is invalid, also in profiles other than `profile`.
    """
    content = _read_content(file)
    profiles = content.get("profiles") or {}
    if not isinstance(profiles, dict) or not all(isinstance(one, dict) for one in profiles.values()):
        raise InputError(
            f"{file}: a profile is not a mapping; write `profiles:`, the name below it, and its settings below that."
        )
    if profile is not None and profile not in profiles:
        advice = f"choose {' or '.join(profiles)}" if profiles else "it has no profiles at all, so leave --profile out"
        raise InputError(f"{file} has no profile {profile!r}; {advice}.")
    services = {name: _load(file, content, profiles.get(name), name) for name in (None, *profiles)}
    return services[profile]


def _read_content(file: Path) -> dict[str, Any]:
    content = read_yaml(file, "`llmops init CHECKPOINT` writes one")
    if not isinstance(content, dict):
        raise InputError(f"{file} must be a mapping with `models`; `llmops init CHECKPOINT` writes one.")
    return content


def _load(file: Path, content: dict[str, Any], overlay: dict[str, Any] | None, profile: str | None) -> LoadedService:
    place = f"{file}, profile {profile}" if profile else str(file)
    try:
        service = ServiceFile.model_validate(_apply_profile(content, overlay or {}))
    except ValidationError as error:
        raise InputError(explain_settings_error(error, ServiceFile, place, "docs/operate.md")) from error
    slos = {name: model.slo.model_dump(exclude_defaults=True) for name, model in service.models.items()}
    objectives = {name: {"slo": slo} for name, slo in slos.items() if slo}
    layers = SettingsLayers(f"{place}, gateway", (service.gateway, {"models": objectives}))
    return LoadedService(file=file, service=service, layers=layers, settings=load_settings(layers))


def _apply_profile(content: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """Return the content with a profile merged into it.

    A profile's `build` replaces the section instead.
    """
    base = copy.deepcopy(content)
    for name, model in _mapping(overlay.get("models")).items():
        if "build" in _mapping(model):
            _mapping(_mapping(base.get("models")).get(name)).pop("build", None)
    return _deep_merge(base, overlay)


def _deep_merge(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """Return `base` updated with `overlay`, recursively in mappings that both have."""
    merged = dict(base)
    for key, value in overlay.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _deep_merge(base[key], value) if both else value
    return merged


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def schema() -> dict[str, Any]:
    """Return the JSON Schema of llmops.yaml, for editors."""
    found = ServiceFile.model_json_schema()
    gateway = GatewaySettings.model_json_schema()
    found["$defs"] = {**gateway.pop("$defs", {}), **found["$defs"]}
    gateway.pop("title")
    found["properties"]["gateway"] = {**gateway, "default": {}}
    # a profile may have any subset of a service's fields, so none is required
    parts = {"gateway": found["properties"]["gateway"]}
    model = copy.deepcopy(found["$defs"]["ModelSection"])
    model.pop("required")
    found["$defs"]["ModelOfProfile"] = model
    parts["models"] = {"type": "object", "additionalProperties": {"$ref": "#/$defs/ModelOfProfile"}}
    found["properties"]["profiles"]["additionalProperties"] = {
        "type": "object", "additionalProperties": False, "properties": parts,
    }  # fmt: skip
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found, "title": "llmops.yaml"}
