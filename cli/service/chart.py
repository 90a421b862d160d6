"""What a description decides of the Helm chart's values; the rest is in deploy/helm/llmops/values.yaml."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from llmops.cli.service.description import Described, Model
from llmops.cli.service.flags import of_build
from llmops.errors import InputError
from llmops.gateway.settings import load_settings

# GPUs of a node
PER_NODE = 8
# of the gateway's settings, those that the chart has values of its own for
_CHARTS = {"triton", "replicas", "host", "port", "store", "redis", "kafka", "open"}
_FLAGS = ("target", "quant", "kv_cache", "gpu", "tp", "pp", "ep", "max_batch_size", "max_seq_len", "max_num_tokens")


class Planned(NamedTuple):
    """Replicas that a model needs, requests/s that each keeps up with, and groups of Prometheus' rules about it."""

    replicas: int
    rate: float
    groups: Sequence[Mapping[str, Any]] = ()


def values_of(described: Described, mounted: str, planned: Callable[[str], Planned]) -> dict[str, Any]:
    """Values for `helm install -f`; `planned` is asked for models with `replicas: auto`.

    Raises InputError for a model that no cluster can serve so.
    """
    root, engines, builds = PurePosixPath(mounted), {}, {}
    plans = {name: planned(name) for name, model in described.service.models.items() if model.replicas == "auto"}
    for name, model in described.service.models.items():
        pool = name.replace(".", "-").replace("_", "-").lower()
        engines[pool] = _pool(name, model, root / name / "repository", plans.get(name))
        builds[pool] = _build(described, name, root / name, engines[pool]["gpus"])
    # not those of this machine's environment
    settings = load_settings(replace(described.layers, alone=True))
    said = settings.model_dump(mode="json", exclude_defaults=True, exclude=_CHARTS)
    groups = [dict(group) for found in plans.values() for group in found.groups]
    watched = {"monitoring": {"groups": groups}} if groups else {}
    return {"engines": engines, "builds": builds, "gateway": {"settings": said}, **watched}


def _pool(name: str, model: Model, repository: PurePosixPath, found: Planned | None) -> dict[str, Any]:
    gpus = model.build.tp * model.build.pp
    if gpus > PER_NODE and gpus % PER_NODE:
        raise InputError(f"{name}: {gpus} GPUs do not fill nodes of {PER_NODE}; plan tp and pp for whole nodes.")
    pool: dict[str, Any] = {"repository": str(repository), "models": [name], "gpus": min(gpus, PER_NODE)}
    if found is not None:
        # nothing is scaled by it before autoscaling.enabled says so
        pool |= {"replicas": found.replicas, "autoscaling": {"requests": float(f"{found.rate:.3g}")}}
    else:
        pool["replicas"] = model.replicas
    return pool if gpus <= PER_NODE else {**pool, "nodes": gpus // PER_NODE}


def _build(described: Described, name: str, folder: PurePosixPath, gpus: int) -> dict[str, Any]:
    """The commands of the Job: the engine, then its repository."""
    flags, engine = of_build(described, name), str(folder / "engine")
    typed = [part for flag in _FLAGS if flag in flags for part in (f"--{flag.replace('_', '-')}", str(flags[flag]))]
    own = [part for option in flags["options"] for part in ("--set", option)]
    fixed = ["--deterministic"] if flags["deterministic"] else []
    return {
        "args": ["build", flags["checkpoint"], "-o", engine, "--name", name, *typed, *own, *fixed],
        "repo": ["repo", f"{name}={engine}", "-o", str(folder / "repository")],
        "gpus": gpus,
    }
