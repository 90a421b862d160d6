"""Values of the Helm chart that follow from llmops.yaml.

The values' types are in `helm_schema.py`, and all other values in deploy/helm/llmops/values.yaml.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.target_facts import TARGETS
from llmops.cli.service.command_defaults import build_defaults, spec_of
from llmops.cli.service.helm_schema import CHART_SETTINGS, LABEL, RESERVED_POOLS
from llmops.cli.service.service_file import LoadedService, ModelSection
from llmops.cli.service.sizing import ModelSizes, asked_servers, egress_rules, estimate_sizes, is_hub_id, resources
from llmops.errors import InputError
from llmops.gateway.settings import GatewaySettings, UsageSettings, load_settings

#: Number of GPUs of a node in the clusters that the chart supports.
PER_NODE = 8
#: Names of the Secrets whose creation docs/kubernetes.md describes.
STORE, REDIS, KAFKA, HUB = "llmops-store", "llmops-redis", "llmops-kafka", "llmops-hub"
SIGNING, ENVIRONMENT = "llmops-signing", "llmops-environment"
_FLAGS = ("target", "quant", "kv_cache", "gpu", "tp", "pp", "ep", "max_batch_size", "max_seq_len", "max_num_tokens")
_GIB = 2**30


class PlannedReplicas(NamedTuple):
    """The planned replicas of a model.

    `rate` is the number of requests per second that one replica can serve. `groups` are the groups
    of Prometheus rules for the model.
    """

    replicas: int
    rate: float
    groups: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class ClusterResources:
    """The resources of a cluster that the chart uses.

    The resources are the images, by their name in the chart, the claim, and the path at which the
    chart mounts the claim.
    """

    images: Mapping[str, str] = field(default_factory=dict)
    claim: str = "llmops-models"
    mounted: str = "/models"


class HelmValues(NamedTuple):
    """Values for `helm install -f`, and sentences about the steps to do before the installation."""

    values: dict[str, Any]
    notes: list[str]


def make_helm_values(
    loaded: LoadedService, cluster: ClusterResources, planned: Callable[[str], PlannedReplicas]
) -> HelmValues:
    """Return Helm values and notes for a service description.

    `planned` is called for models with `replicas: auto`.

    Raises:
        InputError: A cluster cannot serve one of the models, or cannot reach one of the addresses.
    """
    # leave out the settings that come from this machine's environment
    settings = load_settings(replace(loaded.layers, alone=True))
    models = loaded.service.models
    names = _pool_names(models)
    plans = {name: planned(name) for name, model in models.items() if model.replicas == "auto"}
    sizes = {name: estimate_sizes(spec_of(loaded, name)) for name in models}
    engines, builds = {}, {}
    for name, model in models.items():
        folder = PurePosixPath(cluster.mounted, name)
        engines[names[name]] = _pool(name, model, folder / "repository", plans.get(name), sizes[name])
        builds[names[name]] = _build(loaded, name, folder, engines[names[name]]["gpus"], sizes[name])
    for name, pool in names.items():
        for other, taken in names.items():
            if engines[pool].get("nodes", 1) > 1 and re.fullmatch(rf"{pool}-\d+", taken):
                raise InputError(
                    f"The model {name} has several nodes, so the pools {pool} and {taken} would have pods of the same "
                    f"name: rename {name} or {other}."
                )
    groups = [dict(group) for found in plans.values() for group in found.groups]
    values = {
        **({"image": dict(cluster.images)} if cluster.images else {}),
        "storage": {"claim": cluster.claim, "mountPath": cluster.mounted},
        **_access(settings),
        "engines": engines,
        "builds": builds,
        "gateway": _gateway(settings),
        **({"monitoring": {"groups": groups}} if groups else {}),
        **({"network": {"backends": found}} if (found := egress_rules(settings)) else {}),
    }
    return HelmValues(values, [*_notes(settings, cluster, values), *_notes_on_models(loaded, sizes, values)])


def _pool_names(models: Mapping[str, ModelSection]) -> dict[str, str]:
    """Return the name of each model's pool. Raise InputError if a name is invalid or used twice."""
    found: dict[str, str] = {}
    for name, model in models.items():
        pool = name.replace(".", "-").replace("_", "-").lower()
        if not re.fullmatch(LABEL, pool) or pool in RESERVED_POOLS:
            raise InputError(
                f"The model {name} would be the pool {pool!r}, which cannot name objects of Kubernetes: use a name of "
                f"at most 40 letters, digits, dots and dashes that begins and ends with a letter or digit, other than "
                f"{', '.join(RESERVED_POOLS)}."
            )
        if pool in found.values():
            other = next(one for one, taken in found.items() if taken == pool)
            raise InputError(f"The models {other} and {name} would both be the pool {pool}: rename one of them.")
        if not TARGETS[model.build.target].gpus:
            raise InputError(
                f"{name} has the build target {model.build.target}, which the chart's engine image cannot serve: set "
                "build.target to tensorrt or pytorch, in the file or in a profile for the cluster."
            )
        found[name] = pool
    return found


def _access(settings: GatewaySettings) -> dict[str, Any]:
    """Return the values that name Secrets, so that passwords stay in the Secrets.

    Raises:
        InputError: The file has a store, and gateways that do not look at the store's keys.
    """
    if settings.open and settings.store is not None:
        raise InputError(
            "gateway.open answers everyone without a key and bills no one, also the holders of the keys in "
            "gateway.store: leave one of the two out, in the file or in a profile for the cluster."
        )
    secrets: dict[str, Any] = {}
    kafka = settings.kafka
    if settings.store is not None:
        secrets["store"] = {"name": STORE, "key": "url"}
    if settings.redis is not None:
        secrets["redis"] = {"name": REDIS, "key": "url"}
    if kafka is not None and kafka.user:
        secrets["kafka"] = {"name": KAFKA, "key": "password"}
    if kafka is not None:
        secrets["signing"] = {"name": SIGNING, "key": "keys"}
    if _variables(settings):
        secrets["environment"] = {"name": ENVIRONMENT}
    own = {"password", "signing_keys", "signing_keys_file"}
    parameters = kafka.model_dump(exclude_defaults=True, exclude=own) if kafka is not None else {}
    return {
        **({"secrets": secrets} if secrets else {}),
        **({"kafka": parameters} if parameters else {}),
        **({"open": True, "control": {"enabled": False}} if settings.open else {}),
    }


def _variables(settings: GatewaySettings) -> list[str]:
    """Return the names of the environment variables with the API keys of other servers."""
    return sorted({one.key_env for one in asked_servers(settings) if one.key_env})


def _gateway(settings: GatewaySettings) -> dict[str, Any]:
    excluded: dict[str, Any] = dict.fromkeys(CHART_SETTINGS, True)
    excluded |= {"timeouts": {"drain"}, "usage": {"outbox", "bytes"}}
    said = settings.model_dump(mode="json", exclude_defaults=True, exclude=excluded)
    _reject_secrets("gateway", said)
    found: dict[str, Any] = {"settings": {name: value for name, value in said.items() if value != {}}}
    if settings.timeouts.drain != type(settings.timeouts)().drain:
        found["drainSeconds"] = math.ceil(settings.timeouts.drain)
    if settings.usage.bytes != UsageSettings().bytes:
        found["outbox"] = {"mebibytes": math.ceil(settings.usage.bytes / 2**20)}
    return found


def _reject_secrets(name: str, value: Any) -> None:
    """Raise InputError if a URL among the settings has a part that may be a secret.

    A ConfigMap would show the secret.
    """
    if isinstance(value, str) and re.match(r"\w+://.*[@?#]", value):
        raise InputError(
            f"{name}: its URL has a user, a query or a fragment, which may be secrets, and the chart's ConfigMap would "
            "show them; leave them out, and give the whole URL through the environment."
        )
    # the texts that a safety filter looks for are not addresses
    is_list = isinstance(value, list) and not name.endswith((".patterns", ".words"))
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if is_list else ():
        _reject_secrets(f"{name}.{key}", one)


def _pool(
    name: str, model: ModelSection, repository: PurePosixPath, found: PlannedReplicas | None, sizes: ModelSizes | None
) -> dict[str, Any]:
    gpus = model.build.tp * model.build.pp
    if gpus > PER_NODE and gpus % PER_NODE:
        raise InputError(f"{name}: {gpus} GPUs do not fill nodes of {PER_NODE}; plan tp and pp for whole nodes.")
    nodes, each = max(1, gpus // PER_NODE), min(gpus, PER_NODE)
    pool: dict[str, Any] = {"repository": str(repository), "models": [name], "gpus": each}
    if found is not None:
        # autoscaling uses this rate only if autoscaling.enabled is set
        pool |= {"replicas": found.replicas, "autoscaling": {"requests": float(f"{found.rate:.3g}")}}
    else:
        pool["replicas"] = model.replicas
    if nodes > 1 and model.serving == "llmops" and model.build.target == "tensorrt":
        raise InputError(
            f"{name}: `serving: llmops` is for one machine, and {gpus} GPUs need {nodes} machines; leave it out."
        )
    if nodes > 1:
        pool["nodes"] = nodes
    if sizes is not None:
        pool["resources"] = resources(sizes.weights // nodes, each)
    return pool


def _build(
    loaded: LoadedService, name: str, folder: PurePosixPath, gpus: int, sizes: ModelSizes | None
) -> dict[str, Any]:
    """Return the steps of a build Job.

    The steps quantise the model, build the engine in the image with TensorRT-LLM, and make the
    repository.
    """
    flags, engine = build_defaults(loaded, name), str(folder / "engine")
    typed = [part for flag in _FLAGS if flag in flags for part in (f"--{flag.replace('_', '-')}", str(flags[flag]))]
    own = [part for option in flags["options"] for part in ("--set", option)]
    fixed = ["--deterministic"] if flags["deterministic"] else []
    found: dict[str, Any] = {"args": ["build", flags["checkpoint"], "-o", engine, "--name", name, *typed, *own, *fixed]}
    if flags["target"] == "tensorrt":
        found["finish"] = ["build", "--resume", engine]
    found["repo"] = ["repo", f"{name}={engine}", "-o", str(folder / "repository")]
    if name in loaded.serving:
        found["repo"] += ["--serving", loaded.serving[name]]
    if sizes is None:
        found["gpus"] = gpus
    elif sizes.build_gpu:
        found["gpus"] = max(gpus, min(PER_NODE, _quantising_gpus(flags, sizes)))
    else:
        # the checkpoint is served unchanged, and engine pods that wait for the Job hold the GPUs
        found["gpus"] = 0
    if is_hub_id(flags["checkpoint"]):
        found["token"] = {"name": HUB, "key": "token"}
    if sizes is not None:
        found["resources"] = resources(sizes.build_ram, found["gpus"])
    return found


def _quantising_gpus(flags: Mapping[str, Any], sizes: ModelSizes) -> int:
    """Return the number of GPUs that hold the model in 16 bits during quantisation.

    The number is 1 if the kind of GPU is unknown.
    """
    return math.ceil(sizes.build_gpu / find_gpu(flags["gpu"]).memory) if "gpu" in flags else 1


def _notes(settings: GatewaySettings, cluster: ClusterResources, values: Mapping[str, Any]) -> list[str]:
    missing = [name for name in ("gateway", "engine", "build") if name not in cluster.images]
    notes = []
    if missing:
        flags = ", ".join(f"--{name}-image" for name in missing)
        notes.append(f"Images are not named: push them and give {flags}, or set image.{{{','.join(missing)}}}.")
    if settings.store is None and not settings.open:
        notes.append("The file names no store, which the chart needs: set gateway.store, or gateway.open: true.")
    if secrets := values.get("secrets"):
        keys = [f"{one['name']} ({one.get('key') or ', '.join(_variables(settings))})" for one in secrets.values()]
        notes.append(f"Create these Secrets with the keys in brackets, as docs/kubernetes.md says: {'; '.join(keys)}.")
    return notes


def _notes_on_models(
    loaded: LoadedService, sizes: Mapping[str, ModelSizes | None], values: Mapping[str, Any]
) -> list[str]:
    notes, known = [], [found for found in sizes.values() if found is not None]
    models = loaded.service.models
    if any(is_hub_id(model.checkpoint) for model in models.values()):
        notes.append(
            f"If a checkpoint is gated, create the Secret {HUB} with the key token, of an account that may read it."
        )
    for name in (name for name, found in sizes.items() if found is None):
        notes.append(
            f"The config.json of {name} cannot be read here: set resources of its pool and its build, which the chart "
            "asks for."
        )
    notes += [
        f"Set engines.{pool}.leaderScript to leader.sh of `llmops serve REPOSITORY --export lws`, once it is built."
        for pool, found in values["engines"].items()
        if found.get("nodes", 1) > 1
    ]
    if known:
        space = math.ceil(sum(one.checkpoint + one.disk for one in known) / _GIB)
        notes.append(f"The claim needs about {space} GiB for checkpoints and engines.")
    return notes
