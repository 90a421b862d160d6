"""The replicas of a roll-out on a machine's GPUs: room for them, a twin, and the way back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.cli import local_replicas
from llmops.cli.local_replicas import CheckedReplicas, LocalReplicas
from llmops.control.rollouts.schemas import RolloutSettings
from llmops.errors import InputError
from llmops.model_repository import generate, gpu_assignment
from llmops.store.rollouts import ModelVersion
from tests.support.scripted_triton import ScriptedTriton

OLD, NEW = ModelVersion("m", "initial"), ModelVersion("m", "v2", engine="/v2")
TWIN = "initial-twin"


async def read_nothing(model: str, replicas: Sequence[str]) -> None:
    """Read no metadata: these servers are only named."""


@dataclass(eq=False)
class Server:
    """A Triton that is only named."""

    grpc_address: str
    metrics_url: str = ""

    @property
    def pid(self) -> str:
        return self.grpc_address


@dataclass
class Machine:
    """A machine with some GPUs and the replicas of an old version; engines take one GPU each."""

    gpus: int
    replicas: LocalReplicas = field(init=False)
    stopped: list[str] = field(default_factory=list)
    timeouts: set[float] = field(default_factory=set)
    assigned: list[Sequence[int]] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)

    def names(self, version: str) -> list[str]:
        return [server.grpc_address for server in self.replicas.servers.get(("m", version), [])]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    def make(gpus: int, replicas: int) -> Machine:
        one = Machine(gpus)

        def read_engines(_: object, gpus: dict, **options: object) -> str:
            one.assigned.append(list(gpus["m"]))
            return ""

        def stop(server: Server, timeout: float) -> None:
            one.stopped.append(server.grpc_address)
            one.timeouts.add(timeout)

        async def verify(model: str, address: str, *_: str) -> None:
            one.checked.append(address)

        monkeypatch.setattr(gpu_assignment, "count_gpus", lambda: gpus)
        monkeypatch.setattr(generate, "read_engines", read_engines)
        monkeypatch.setattr(generate, "generate_repository", lambda engines, repository: None)
        monkeypatch.setattr(EngineManifest, "load", lambda folder: SimpleNamespace())
        monkeypatch.setattr(local_replicas, "_gpus_of", lambda manifest: 1)
        monkeypatch.setattr(local_replicas, "read_metadata", read_nothing)
        monkeypatch.setattr(local_replicas, "verify_quickly", verify)
        one.replicas = LocalReplicas(lambda repository, timeout: Server(repository.name), stop, Path("/versions"))
        one.replicas.servers["m", "initial"] = [Server(f"base-{at}") for at in range(replicas)]
        one.replicas.engines["m", "initial"] = Path("/v1")
        return one

    return make


async def test_new_replicas_and_a_twin_start_beside_the_old_ones_on_gpus_of_their_own(machine):
    one = machine(gpus=6, replicas=2)
    started = await one.replicas.start(NEW, OLD, RolloutSettings(twin=True), TWIN)
    assert started.addresses == ["m@v2-0", "m@v2-1"]
    assert started.stable == ["base-0", "base-1"]
    assert started.twin == ModelVersion("m", TWIN, "/v1", ["m@initial-twin-0", "m@initial-twin-1"])
    assert one.assigned == [[2], [3], [4], [5]]
    assert one.checked == ["m@v2-0", "m@v2-1", "m@initial-twin-0", "m@initial-twin-1"]
    assert await one.replicas.restore(OLD, NEW) == ()
    await one.replicas.stop(NEW, 0)
    # what is free now lies before the twin
    await one.replicas.start(ModelVersion("m", "v3", engine="/v3"), OLD, RolloutSettings(), TWIN)
    assert one.assigned[4:] == [[2], [3]]


async def test_without_room_there_is_no_twin_and_no_old_replica_stops_for_it(machine):
    one = machine(gpus=5, replicas=2)
    started = await one.replicas.start(NEW, OLD, RolloutSettings(twin=True, allow_capacity_loss=True), TWIN)
    assert started.twin is None
    assert "No GPU is free" in started.twin_problem
    # the twin's first replica had a GPU
    assert one.stopped == ["m@initial-twin-0"]
    assert started.stable == ["base-0", "base-1"]


async def test_without_a_free_gpu_the_capacity_that_it_costs_is_said(machine):
    one = machine(gpus=2, replicas=2)
    with pytest.raises(InputError, match=r"needs 1, and 2 of 2 are in use. One by one, 1 of 2 replicas would serve"):
        await one.replicas.start(NEW, OLD, RolloutSettings(), TWIN)
    assert (one.stopped, one.names("initial"), one.names("v2")) == ([], ["base-0", "base-1"], [])


async def test_replicas_that_made_room_come_back_with_a_rollback(machine):
    one = machine(gpus=2, replicas=2)
    settings = RolloutSettings(allow_capacity_loss=True, drain_timeout=120.0)
    started = await one.replicas.start(NEW, OLD, settings, TWIN)
    assert (started.addresses, started.stable) == (["m@v2-0", "m@v2-1"], [])
    assert one.timeouts == {120.0}
    assert one.stopped == ["base-1", "base-0"]
    assert one.assigned == [[1], [0]]
    assert await one.replicas.restore(OLD, NEW) == ["m@initial-0", "m@initial-1"]
    # one by one, the last started first
    assert one.stopped == ["base-1", "base-0", "m@v2-1", "m@v2-0"]
    assert one.assigned == [[1], [0], [0], [1]]
    await one.replicas.stop(NEW, 0)
    assert await one.replicas.restore(OLD, NEW) == ()


CARD = {
    "name": "m", "target": "openvino", "tokenizer_dir": "/t", "max_seq_len": 4096, "vocab_size": 9, "end_ids": [2],
    "tokenizer": "a", "template": "a",
}  # fmt: skip


@pytest.fixture
async def tritons():
    """Two that have the same card, which a test may replace."""
    async with ScriptedTriton(CARD, lambda tensors: []) as old, ScriptedTriton(CARD, lambda tensors: []) as new:
        yield old, new


@pytest.mark.parametrize(
    ("changed", "differences"),
    [
        ({}, ""),
        ({"max_seq_len": 512, "tokenizer": "b"}, "a context of 512 tokens instead of 4096 and another tokenizer"),
        ({"template": "b"}, "another chat template"),
        ({"chat_template": False}, "another chat template"),
        # the repository of an earlier llmops
        ({"tokenizer": "", "template": ""}, ""),
    ],
)
async def test_replicas_that_run_already_are_compared(tritons, monkeypatch, changed, differences):
    monkeypatch.setattr(local_replicas, "verify_quickly", read_nothing)
    old, new = tritons
    new.card = {**CARD, **changed}
    checked = CheckedReplicas([old.address])
    candidate = ModelVersion("m", "v2", replicas=[f"m={new.address}/m-tensorrt_llm"])
    started = await checked.start(candidate, OLD, RolloutSettings(), TWIN)
    assert started.differences == differences


async def test_a_stable_version_that_control_cannot_ask_is_not_taken_for_equal(tritons, monkeypatch):
    monkeypatch.setattr(local_replicas, "verify_quickly", read_nothing)
    candidate = ModelVersion("m", "v2", replicas=[tritons[1].address])
    started = await CheckedReplicas(["127.0.0.1:9"]).start(candidate, OLD, RolloutSettings(), TWIN)
    assert started.differences is None
