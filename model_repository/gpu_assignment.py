"""The assignment of GPUs to the engines of one repository.

Every engine without an assignment takes the first GPUs, because `LLM()` maps its ranks to GPUs from
0 on. (NVIDIA/TensorRT-LLM #11153, after 1.2.1, gives each Triton instance its own
CUDA_VISIBLE_DEVICES.) So in a repository with several engines on GPUs, each engine is assigned GPUs
that no other engine may use.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmops.build.environment import visible_gpus
from llmops.errors import InputError, ResourceError


@dataclass(frozen=True)
class GpuRequirement:
    """The number of GPUs that an engine needs, and the GPUs that the engine's settings name."""

    name: str
    count: int
    chosen: tuple[int, ...] = ()


def parse_gpus(assignments: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the GPU numbers in each `NAME=0,1`, by name. Raise InputError for any other form."""
    found: dict[str, tuple[int, ...]] = {}
    for text in assignments:
        name, equals, ids = text.partition("=")
        numbers = ids.split(",")
        if not (name and equals and all(number.strip().isdigit() for number in numbers)):
            raise InputError(
                f"--gpus {text} names no GPUs; write NAME=0,1, with the number of each GPU after the name."
            )
        found[name] = tuple(int(number) for number in numbers)
    return found


def assign_gpus(needs: Sequence[GpuRequirement], wanted: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the GPU numbers of each engine, by name.

    A single engine without an assignment keeps its library's choice and is not in the result.

    Raises:
        InputError: `wanted` names an unknown engine or too few GPUs, two engines share a GPU, or
            this machine has too few GPUs.
    """
    names = [need.name for need in needs]
    unknown = next((name for name in wanted if name not in names), None)
    if unknown is not None:
        remedy = f"choose one of {', '.join(names)}" if names else "the repository has none, so leave --gpus out"
        raise InputError(f"--gpus {unknown}=…: no GPU engine has that name; {remedy}.")
    chosen = {need.name: wanted.get(need.name, need.chosen) for need in needs}
    for need in needs:
        if chosen[need.name] and len(set(chosen[need.name])) != need.count:
            raise InputError(
                f"{need.name} needs {need.count} different GPUs, but was given "
                f"{_listed(chosen[need.name])}: name {need.count} different GPUs."
            )
    taken: dict[int, str] = {}
    for name, gpus in chosen.items():
        for gpu in gpus:
            if gpu in taken:
                raise InputError(
                    f"{taken[gpu]} and {name} would both run on GPU {gpu}: give each engine its own GPUs with --gpus."
                )
            taken[gpu] = name
    if len(needs) > 1:
        for need in needs:
            chosen[need.name] = chosen[need.name] or _next_free(need.count, taken)
            taken.update(dict.fromkeys(chosen[need.name], need.name))
    _check_gpu_ids(chosen)
    return {name: gpus for name, gpus in chosen.items() if gpus}


def check_gpu_count(needed: int) -> None:
    """Raise ResourceError if this machine has fewer GPUs than `needed`.

    Without nvidia-smi the number is unknown, and the check passes.
    """
    present = count_gpus()
    if present is not None and needed > present:
        raise ResourceError(
            f"The engines of this repository need {needed} GPUs, but {_has(present)}: serve fewer engines, "
            "or build them with a smaller --tp."
        )


def share_gpus(needed: int, replicas: int) -> Sequence[str]:
    """Return CUDA_VISIBLE_DEVICES for each of several servers that need `needed` GPUs each.

    Raises ResourceError if this machine has too few GPUs. Without nvidia-smi the number is not
    known.
    """
    visible, total = visible_gpus(), needed * replicas
    if visible is not None and len(visible) < total:
        raise ResourceError(
            f"{replicas} replicas need {total} GPUs, {needed} each, but {_has(len(visible))}: start fewer "
            "with --replicas, or build the engine with a smaller --tp."
        )
    gpus = [str(number) for number in range(total)] if visible is None else visible
    return [",".join(gpus[first : first + needed]) for first in range(0, total, needed)]


def count_gpus() -> int | None:
    """Return the number of GPUs that this process may use, or None if it is unknown."""
    visible = visible_gpus()
    return None if visible is None else len(visible)


def _has(present: int) -> str:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"this machine has {present}" if chosen is None else f"CUDA_VISIBLE_DEVICES={chosen} leaves {present}"


def _check_gpu_ids(chosen: Mapping[str, tuple[int, ...]]) -> None:
    present = count_gpus()
    for name, gpus in chosen.items():
        if present is not None and gpus and max(gpus) >= present:
            total = sum(len(one) for one in chosen.values())
            raise InputError(
                f"{name} would run on GPU {max(gpus)}, but {_has(present)}; the engines of this repository "
                f"take {total}: serve fewer engines, or build them with a smaller --tp."
            )


def _next_free(count: int, taken: Mapping[int, str]) -> tuple[int, ...]:
    """Return the first `count` consecutive GPU numbers that are not taken."""
    first = max(taken, default=-1) + 1
    gaps = [start for start in range(first) if not any(gpu in taken for gpu in range(start, start + count))]
    start = gaps[0] if gaps else first
    return tuple(range(start, start + count))


def _listed(gpus: tuple[int, ...]) -> str:
    return ",".join(map(str, gpus))
