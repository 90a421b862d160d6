"""What a description decides of the Helm chart's values; the rest is in deploy/helm/llmops/values.yaml."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from llmops.cli.service.description import Described, Model
from llmops.cli.service.flags import of_build, of_plan
from llmops.errors import InputError

# GPUs of a node, and where the chart mounts its claim unless it is told
PER_NODE, MOUNTED = 8, "/models"
# of the gateway's settings, those that the chart has values of its own for
_CHARTS = {"triton", "replicas", "host", "port", "store", "redis", "kafka", "open"}
_FLAGS = ("target", "quant", "kv_cache", "gpu", "tp", "pp", "ep", "max_batch_size", "max_seq_len", "max_num_tokens")


def values_of(described: Described, mounted: str = MOUNTED) -> dict[str, Any]:
    """Values for `helm install -f`. Raises InputError for a model that no cluster can serve so."""
    root, engines, builds = PurePosixPath(mounted), {}, {}
    for name, model in described.service.models.items():
        pool = name.replace(".", "-").replace("_", "-").lower()
        engines[pool] = _pool(described, name, model, root / name / "repository")
        builds[pool] = _build(described, name, root / name, engines[pool]["gpus"])
    settings = described.settings.model_dump(mode="json", exclude_defaults=True, exclude=_CHARTS)
    return {"engines": engines, "builds": builds, "gateway": {"settings": settings}}


def _pool(described: Described, name: str, model: Model, repository: PurePosixPath) -> dict[str, Any]:
    gpus = model.build.tp * model.build.pp
    if gpus > PER_NODE and gpus % PER_NODE:
        raise InputError(f"{name}: {gpus} GPUs do not fill nodes of {PER_NODE}; plan tp and pp for whole nodes.")
    replicas = _planned(described, name) if model.replicas == "auto" else model.replicas
    pool = {"repository": str(repository), "models": [name], "gpus": min(gpus, PER_NODE), "replicas": replicas}
    return pool if gpus <= PER_NODE else {**pool, "nodes": gpus // PER_NODE}


def _planned(described: Described, name: str) -> int:
    """How many replicas the plan has for the layout that the file has."""
    from llmops.cli import plan

    with plan.command.make_context("chart", [], default_map=of_plan(described, name)) as context:
        found = plan.make_plan(context.params.pop("checkpoint"), context.params)
    replicas: int = found.best.replicas
    return replicas


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
