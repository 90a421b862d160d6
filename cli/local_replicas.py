"""The replicas of a roll-out on this machine, beside the Tritons of `llmops up`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.build.target_facts import TARGETS
from llmops.cli.output import print_line
from llmops.contract import ENGINE_SUFFIX
from llmops.control.rollouts.schemas import RolloutSettings
from llmops.control.rollouts.version_replicas import StartedReplicas
from llmops.errors import InputError, ServerError
from llmops.gateway.errors import UnavailableError
from llmops.gateway.interfaces import ModelMetadata
from llmops.gateway.replica_address import parse_replica
from llmops.gateway.routing.discovery import AddressResolver
from llmops.gateway.triton.grpc_client import TritonClient
from llmops.gateway.triton.model_metadata import parse_model_metadata
from llmops.process import module_command
from llmops.store.rollouts import ModelVersion

if TYPE_CHECKING:
    from llmops.model_repository.launch import TritonServer

T = TypeVar("T")

#: Maximum seconds for the checks of a replica. On a busy machine the checks take a minute.
VERIFY_TIMEOUT = 600.0

#: Maximum seconds in which one replica of a version must return its model metadata.
METADATA_TIMEOUT = 10.0


async def verify_quickly(model: str, triton: str, metrics: str | None = None, engine: str = "") -> None:
    """Run `llmops verify --quick` on a Triton. Raise ServerError with the first fault.

    The checks run in a separate process, so that they do not block the gateway's event loop.
    """
    command = module_command("llmops.cli", "verify", "--triton", triton, "-m", model, "--quick", "--json")
    command += ["--metrics", metrics] if metrics else []
    command += ["--engine", engine] if engine else []
    # use Popen, because uvloop's subprocesses fork, and gRPC's fork handlers would print on the
    # terminal
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        async with asyncio.timeout(VERIFY_TIMEOUT):
            out, err = await asyncio.to_thread(process.communicate)
    except TimeoutError:
        raise ServerError(
            f"`llmops verify --quick` of {triton} did not end within {VERIFY_TIMEOUT:g} s; see Triton's log."
        ) from None
    finally:
        process.kill()
    if process.returncode:
        raise ServerError(f"`llmops verify --quick` of {triton} found a fault: {_first_fault(out, err)}")


def _first_fault(out: bytes, err: bytes) -> str:
    try:
        return str(json.loads(out)["faults"][0])
    except (ValueError, KeyError, IndexError):
        return last_line(err)


def last_line(output: bytes) -> str:
    """Return the last line that a process printed before it failed."""
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


async def read_metadata(model: str, replicas: Sequence[str]) -> ModelMetadata | None:
    """Return a model's metadata from the first of `replicas` that serves the model, or None.

    `replicas` are addresses in the form of the setting `replicas`.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(METADATA_TIMEOUT):
            for address in await AddressResolver([parse_replica(one) for one in replicas]).find():
                client = TritonClient(address.server)
                # a DNS name for the replicas of several models also has servers without this model
                with contextlib.suppress(UnavailableError, InputError):
                    try:
                        text = await client.metadata_text(address.engine_model or model + ENGINE_SUFFIX)
                        return parse_model_metadata(text, {"name": model})
                    finally:
                        await client.close()
    return None


def describe_differences(old: ModelMetadata | None, new: ModelMetadata | None) -> str | None:
    """Return the differences of a new version for clients, such as "another tokenizer".

    The text is empty without a difference. The result is None if the metadata of a version is
    unknown.
    """
    if old is None or new is None:
        return None
    found = []
    if old.max_seq_len != new.max_seq_len:
        found.append(f"a context of {new.max_seq_len} tokens instead of {old.max_seq_len}")
    # repositories that an earlier llmops made announce no digest
    if old.vocab_size != new.vocab_size or (old.tokenizer and new.tokenizer and old.tokenizer != new.tokenizer):
        found.append("another tokenizer")
    if old.chat_template != new.chat_template or (old.template and new.template and old.template != new.template):
        found.append("another chat template")
    return " and ".join(found)


class CheckedReplicas:
    """Replicas that an operator or another program starts. Each replica is checked."""

    def __init__(self, initial: Sequence[str] = ()) -> None:
        """Create an object for versions whose replicas the store names.

        `initial` are the replicas of a model's first version, which the gateways' settings name.
        """
        self._initial = initial

    async def start(
        self, candidate: ModelVersion, stable: ModelVersion, settings: RolloutSettings, twin: str
    ) -> StartedReplicas:
        if not candidate.replicas:
            raise InputError(
                "This control starts no replicas. Start them, and name them: `llmops rollout start "
                f"{candidate.model} --replica HOST:PORT`; or use `llmops up` with this store"
            )
        for replica in candidate.replicas:
            # the checks of a DNS name use any one of its addresses
            server = replica.removeprefix("dns:").rpartition("=")[2].partition("/")[0]
            await verify_quickly(candidate.model, server)
        old = await read_metadata(stable.model, stable.replicas or self._initial)
        new = await read_metadata(candidate.model, candidate.replicas)
        return StartedReplicas(candidate.replicas, differences=describe_differences(old, new))

    async def restore(self, stable: ModelVersion, candidate: ModelVersion) -> Sequence[str]:
        return ()

    async def stop(self, version: ModelVersion, drain_timeout: float) -> None:
        return


class LocalReplicas(CheckedReplicas):
    """Tritons on this machine that roll-outs use.

    The Tritons end with `llmops up`, and its next start starts them again.
    """

    def __init__(
        self,
        start_server: Callable[[Path, int], TritonServer],
        stop_server: Callable[[TritonServer, float], None],
        folder: Path,
        tenants_apart: bool = False,
    ) -> None:
        """Create an object without servers.

        Args:
            start_server: Starts a Triton on a repository with an exit timeout in seconds, and waits
                until it is ready.
            stop_server: Drains a Triton for at most this number of seconds, and stops it.
            folder: The folder for the repositories of versions.
            tenants_apart: True if the gateway keeps the cached prefixes of tenants apart.
        """
        super().__init__()
        self._tenants_apart = tenants_apart
        self._start_server, self._stop_server, self._folder = start_server, stop_server, folder
        # engine folder and servers by model and version
        self.engines: dict[tuple[str, str], Path] = {}
        self.servers: dict[tuple[str, str], list[TritonServer]] = {}
        # GPUs of the servers that roll-outs have started
        self._gpus: dict[TritonServer, Collection[int]] = {}
        # number of a version's servers before a roll-out stopped some of them to free GPUs
        self._counts: dict[tuple[str, str], int] = {}
        # a server ends with the thread that started it, so start all servers in a thread that stays
        self._thread = ThreadPoolExecutor(1, "version-replicas")

    async def start(
        self, candidate: ModelVersion, stable: ModelVersion, settings: RolloutSettings, twin: str
    ) -> StartedReplicas:
        key, old = (candidate.model, candidate.name), (stable.model, stable.name)
        serving = [server.grpc_address for server in self.servers.get(old, ())]
        if not candidate.engine:
            stable = replace(stable, replicas=stable.replicas or serving)
            return await super().start(candidate, stable, settings, twin)
        if old not in self.servers:
            served = ", ".join(sorted({model for model, _ in self.servers})) or "none"
            raise InputError(f"This `llmops up` has no replicas of {stable.model}; its models are {served}.")
        count = self._counts.setdefault(old, len(self.servers[old]))
        # remember the number before old replicas may be stopped to free GPUs
        before = await read_metadata(stable.model, serving)
        await self._start_and_check(candidate, count, settings, old)
        servers = self.servers[key]
        started_twin, problem = None, ""
        if settings.twin:
            started_twin = ModelVersion(stable.model, twin, str(self.engines[old]))
            try:
                # start the twin only on free GPUs: it is no reason to stop replicas that serve
                # requests
                kept = settings.model_copy(update={"allow_capacity_loss": False})
                await self._start_and_check(started_twin, len(servers), kept, old)
            except InputError as error:
                await self.stop(started_twin, 0)
                started_twin, problem = None, error.message
            else:
                twins = self.servers[stable.model, twin]
                started_twin = replace(started_twin, replicas=[server.grpc_address for server in twins])
        return StartedReplicas(
            [server.grpc_address for server in servers],
            [server.grpc_address for server in self.servers[old]],
            describe_differences(before, await read_metadata(candidate.model, [servers[0].grpc_address])),
            started_twin,
            problem,
        )

    async def _start_and_check(
        self, version: ModelVersion, count: int, settings: RolloutSettings, old: tuple[str, str]
    ) -> None:
        await self._in_thread(self.start_version, version, count, settings, old)
        for server in self.servers[version.model, version.name]:
            await verify_quickly(version.model, server.grpc_address, server.metrics_url, version.engine)

    async def restore(self, stable: ModelVersion, candidate: ModelVersion) -> Sequence[str]:
        key, other = (stable.model, stable.name), (candidate.model, candidate.name)
        servers, count = self.servers.get(key, []), self._counts.get(key, 0)
        if len(servers) >= count:
            return ()
        version = replace(stable, engine=str(self.engines[key]))
        await self._in_thread(self.start_version, version, count, RolloutSettings(allow_capacity_loss=True), other)
        return [server.grpc_address for server in self.servers[key]]

    async def stop(self, version: ModelVersion, drain_timeout: float) -> None:
        servers = self.servers.pop((version.model, version.name), [])
        # a Triton with several models keeps running for its other models
        shared = [server for key, others in self.servers.items() if key[0] != version.model for server in others]
        servers = [server for server in servers if server not in shared]
        await asyncio.gather(*(asyncio.to_thread(self._stop_one, server, drain_timeout) for server in servers))

    def start_version(
        self,
        version: ModelVersion,
        count: int,
        settings: RolloutSettings = RolloutSettings(),
        old: tuple[str, str] = ("", ""),
    ) -> None:
        """Start replicas of a version until `count` are running.

        If no GPU is free beside the replicas of `old`, replicas of `old` are stopped first, if the
        roll-out's settings allow it.

        Raises:
            InputError: The engine cannot be served, or no GPU is free for it.
            ServerError: A Triton does not start.
        """
        from llmops.model_repository.generate import generate_repository, read_engines

        key, engine = (version.model, version.name), Path(version.engine)
        manifest = EngineManifest.load(engine)
        running = self.servers.setdefault(key, [])
        self.engines[key] = engine
        try:
            while len(running) < count:
                gpus = self._make_room(manifest, key, old, settings)
                # names of models have no @, so two models never share a folder
                repository = self._folder / f"{version.model}@{version.name}-{len(running)}"
                engines = read_engines(
                    (f"{version.model}={engine}",),
                    gpus={version.model: gpus} if gpus else None,
                    tenants_apart=self._tenants_apart,
                )
                generate_repository(engines, repository)
                server = self._start_server(repository, round(settings.drain_timeout))
                running.append(server)
                self._gpus[server] = gpus
        except BaseException:
            if not running:
                del self.servers[key]
            raise

    def _make_room(
        self, manifest: EngineManifest, key: tuple[str, str], old: tuple[str, str], settings: RolloutSettings
    ) -> tuple[int, ...]:
        """Return the numbers of free GPUs for a replica, or no numbers for an engine without GPUs.

        If too few GPUs are free and `settings` allow a loss of capacity, replicas of `old` are
        stopped first.

        Args:
            manifest: The manifest of the engine.
            key: The model and the version of the replica.
            old: The model and the version whose replicas may be stopped.
            settings: The settings of the roll-out.

        Raises:
            InputError: Too few GPUs are free.
        """
        from llmops.model_repository.gpu_assignment import count_gpus

        need, present, servers = _gpus_of(manifest), count_gpus(), self.servers.get(old, [])
        while True:
            used = self._used_gpus()
            limit = len(used) + need if present is None else present
            free = [gpu for gpu in range(limit) if gpu not in used]
            if len(free) >= need:
                return tuple(free[:need])
            if not settings.allow_capacity_loss or not servers:
                left = f"{len(servers) - 1} of {len(servers)}" if servers else "none"
                raise InputError(
                    f"No GPU is free beside the replicas of {key[0]}: a replica needs {need}, and {len(used)} of "
                    f"{present} are in use. One by one, {left} replicas would serve meanwhile; to accept that, start "
                    "the roll-out with --allow-capacity-loss"
                )
            self._stop_one(servers.pop(), settings.drain_timeout)

    def _used_gpus(self) -> Collection[int]:
        # the servers that `llmops up` starts itself use the first GPUs
        base = sum(
            _gpus_of(EngineManifest.load(self.engines[key]))
            for key, servers in self.servers.items()
            for server in servers
            if server not in self._gpus
        )
        return {*range(base), *(gpu for gpus in self._gpus.values() for gpu in gpus)}

    def _stop_one(self, server: TritonServer, timeout: float) -> None:
        self._stop_server(server, timeout)
        self._gpus.pop(server, None)

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


def _gpus_of(manifest: EngineManifest) -> int:
    return manifest.parallelism.world_size if TARGETS[manifest.target].gpus else 0


async def restore_versions(
    store_url: str, replicas: LocalReplicas, models: Mapping[str, Path], base: Sequence[TritonServer]
) -> None:
    """Start the versions that the store has in use, and write the addresses of all replicas.

    Args:
        store_url: The URL of the store.
        replicas: The object that starts and stops the servers.
        models: The engine folder of each model that the servers in `base` serve.
        base: The servers that run already, which are replicas of the oldest version.
    """
    from llmops.store.factory import open_store
    from llmops.store.rollouts import INITIAL_VERSION, RETIRED, open_rollouts, require_versions, set_replicas

    async with await open_store(store_url, pool_size=1) as store:
        async with store.read() as connection:
            versions = {model: await require_versions(connection, model) for model in models}
            starting = {one.candidate for one in await open_rollouts(connection) if one.state == "starting"}
        for model, engine in models.items():
            own = versions[model]
            oldest = own[0].name if own else INITIAL_VERSION
            replicas.servers[(model, oldest)], replicas.engines[(model, oldest)] = list(base), engine
            for version in own[1:]:
                if version.engine and version.state != RETIRED and version.name not in starting:
                    # start the servers in this thread, because they end with the thread that starts
                    # them
                    replicas.start_version(version, len(base))
            serving = max(own, key=lambda version: version.weight, default=None)
            if serving is not None and serving.name != oldest:
                print_line(
                    f"{model} is served by its version {serving.name} ({serving.engine}), not {engine}.", err=True
                )
            if own and own[0].state == RETIRED and len(models) == 1:
                await replicas.stop(own[0], 0)
            async with store.write() as connection:
                for version in own:
                    servers = replicas.servers.get((model, version.name))
                    if servers is not None:
                        await set_replicas(connection, model, version.name, [one.grpc_address for one in servers])
