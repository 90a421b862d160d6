"""The parameters that each command takes from llmops.yaml, as defaults for its flags."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llmops.build.plan.speed.workload import TARGET_LATENCIES
from llmops.build.target_facts import TARGETS, TargetName
from llmops.errors import InputError, LlmopsError

if TYPE_CHECKING:
    from llmops.build.spec import BuildSpec
    from llmops.cli.service.service_file import LoadedService

# the fields of `build` whose flags of `llmops build` have other names
_BUILD = ("target", "kv_cache", "gpu", "tp", "pp", "ep", "max_batch_size", "max_seq_len", "max_num_tokens")


def default_quant(checkpoint: str, target: TargetName) -> str:
    """Return the format of weights that is built if the user names none.

    Encoders stay in float32. Checkpoints for GPUs that are already quantised, or that llmops cannot
    quantise, stay unchanged.
    """
    from llmops.build.encoder import is_encoder
    from llmops.build.model.families import FAMILIES
    from llmops.build.plan.model_lookup import look_up_model

    facts = TARGETS[target]
    if is_encoder(checkpoint):
        return "none"
    # ignore the error here, because the build reports a checkpoint that cannot be read
    with contextlib.suppress(LlmopsError):
        found = look_up_model(checkpoint).checkpoint if facts.gpus else None
        if found and (found.kept_quantisation or FAMILIES[found.architecture.family].as_published):
            return "none"
    return facts.quant


@contextlib.contextmanager
def name_model(loaded: LoadedService, model: str) -> Iterator[None]:
    """Make errors about the values of a model name the file and the model."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{loaded.file}, models.{model}, and the options: {error.message}") from error


def build_defaults(loaded: LoadedService, name: str) -> dict[str, Any]:
    """Return the parameters of `llmops build`."""
    model = loaded.service.models[name]
    build = model.build
    fields = {field: getattr(build, field) for field in _BUILD}
    return _without_none(
        **fields,
        checkpoint=model.checkpoint,
        output=loaded.engine(name),
        name=name,
        quant=build.quant or default_quant(model.checkpoint, build.target),
        deterministic=build.deterministic,
        options=[f"{key}={value}" for key, value in build.set.items()],
    )


def spec_of(loaded: LoadedService, name: str) -> BuildSpec:
    """Return the build specification of one model."""
    from llmops.build.spec import BuildSpec

    return BuildSpec(**{**build_defaults(loaded, name), "options": dict(loaded.service.models[name].build.set)})


def plan_defaults(loaded: LoadedService, name: str) -> dict[str, Any]:
    """Return the parameters of `llmops plan`.

    A model described for a CPU is planned for the planner's default GPU.
    """
    model = loaded.service.models[name]
    build, gpus = model.build, TARGETS[model.build.target].gpus
    layout = {"tp": build.tp, "pp": build.pp, "ep": build.ep, "target": build.target, "quant": build.quant}
    limits = {"max_seq_len": build.max_seq_len, "max_num_tokens": build.max_num_tokens, "gpu": build.gpu}
    # with `auto`, the planner chooses only the number of replicas; the file describes a replica
    load = model.traffic.model_dump()
    shape = layout | limits if gpus else {}
    targets = {target: getattr(model.slo, target) for target in (*TARGET_LATENCIES, "availability")}
    return _without_none(name=name, checkpoint=model.checkpoint, **load, **targets, **shape)


def repo_defaults(loaded: LoadedService) -> dict[str, Any]:
    """Return the parameters of `llmops repo`."""
    engines = tuple(f"{name}={loaded.engine(name)}" for name in loaded.service.models)
    return {"engines": engines, "output": loaded.repository}


def up_defaults(loaded: LoadedService) -> dict[str, Any]:
    """Return the parameters of `llmops up`."""
    return {"host": loaded.settings.host, "port": loaded.settings.port}


def verify_defaults(loaded: LoadedService, name: str) -> dict[str, Any]:
    """Return the parameters of `llmops verify`."""
    return {"engine": loaded.engine(name), "model": name}


def bench_defaults(loaded: LoadedService, name: str) -> dict[str, Any]:
    """Return the parameters of `llmops bench`.

    The parameters describe the load in `traffic` against the gateway, with the objectives in `slo`.
    """
    model, settings = loaded.service.models[name], loaded.settings
    load, slo = model.traffic, model.slo
    prefix = round((load.isl or 0) * (load.prefix_hit or 0.0))
    return _without_none(
        url=f"http://{settings.host}:{settings.port}/v1",
        model=name,
        rate=load.qps,
        input_=str(load.isl - prefix) if load.isl else None,
        prefix_tokens=prefix or None,
        output=str(load.osl) if load.osl else None,
        slo=tuple(map(str, slo.listed())),
    )


def _without_none(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
