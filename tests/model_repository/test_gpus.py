"""Engines of one repository on GPUs of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmops.errors import InputError, ResourceError
from llmops.model_repository import gpu_assignment
from llmops.model_repository.gpu_assignment import GpuRequirement, assign_gpus, check_gpu_count, parse_gpus
from llmops.model_repository.multi_gpu.launch_plan import without_slurm_variables


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_assignment, "count_gpus", lambda: None)


def test_several_engines_get_gpus_of_their_own() -> None:
    """Without it each takes GPU 0: `LLM()` maps its ranks to GPUs from 0 on (NVIDIA/TensorRT-LLM
    #11153).
    """
    needs = [
        GpuRequirement("a", 2),
        GpuRequirement("b", 1),
        GpuRequirement("c", 4, (4, 5, 6, 7)),
        GpuRequirement("d", 1),
    ]
    assert assign_gpus(needs, {"b": (1,)}) == {"a": (2, 3), "b": (1,), "c": (4, 5, 6, 7), "d": (0,)}


def test_an_engine_that_is_alone_keeps_the_choice_of_its_library() -> None:
    assert assign_gpus([GpuRequirement("a", 8)], {}) == {}
    assert assign_gpus([GpuRequirement("a", 1)], {"a": (3,)}) == {"a": (3,)}


@pytest.mark.parametrize(
    ("needs", "wanted", "says"),
    [
        (
            [GpuRequirement("a", 1), GpuRequirement("b", 1)],
            {"a": (0,), "b": (0,)},
            "a and b would both run on GPU 0: give each",
        ),
        ([GpuRequirement("a", 2)], {"a": (0,)}, "a needs 2 GPUs of its own, and 0 was given"),
        ([GpuRequirement("a", 2)], {"a": (1, 1)}, "a needs 2 GPUs of its own, and 1,1 was given"),
        ([GpuRequirement("a", 2)], {"x": (0,)}, "no GPU engine has that name; choose one of a"),
    ],
)
def test_an_overlap_or_a_wrong_number_is_refused(needs: list[GpuRequirement], wanted: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        assign_gpus(needs, wanted)


def test_more_gpus_than_there_are_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_assignment, "count_gpus", lambda: 2)
    with pytest.raises(InputError, match=r"^b would run on GPU 3, and this machine has 2; .* take 4: serve fewer"):
        assign_gpus([GpuRequirement("a", 2), GpuRequirement("b", 2)], {})
    with pytest.raises(ResourceError, match=r"^The engines of this repository need 8 GPUs, and this machine has 2"):
        check_gpu_count(8)


def test_the_option_is_parsed() -> None:
    assert parse_gpus(["a=0,1", "b=7"]) == {"a": (0, 1), "b": (7,)}
    for wrong in ("a", "a=", "=0", "a=0;1", "a=x"):
        with pytest.raises(InputError, match="write NAME=0,1"):
            parse_gpus([wrong])


def test_the_gpus_are_counted_as_nvidia_smi_lists_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)"\necho "GPU 1: NVIDIA H100"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert gpu_assignment.count_gpus() == 2


def test_mpi_does_not_see_the_slurm_allocation() -> None:
    """MPI_ERR_SPAWN otherwise: ai-dynamo/dynamo #808 and #992."""
    inside = {"SLURM_JOB_ID": "7", "SLURM_NODELIST": "n1", "PMIX_RANK": "0", "PATH": "/bin"}
    assert without_slurm_variables(inside) == {"PATH": "/bin"}
    launched = {**inside, "TLLM_SPAWN_PROXY_PROCESS": "1"}
    assert without_slurm_variables(launched) == launched
    outside = {"PMIX_RANK": "0", "PATH": "/bin"}
    assert without_slurm_variables(outside) == outside
