"""The replicas of a roll-out on this machine: Tritons beside those of `llmops up`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.build.target_facts import TARGETS
from llmops.control.rollouts.state_machine import RolloutSettings
from llmops.control.rollouts.version_replicas import StartedReplicas
from llmops.errors import InputError, ServerError
from llmops.store.rollouts import ModelVersion

if TYPE_CHECKING:
    from llmops.model_repository.launch import TritonServer

T = TypeVar("T")

#: Seconds for the checks of a replica. On a busy machine they take a minute.
VERIFY_TIMEOUT = 600.0


async def verify_quickly(model: str, triton: str, metrics: str | None = None, engine: str = "") -> None:
    """Run `llmops verify --quick` on a Triton, in a process that leaves the gateway its event loop.

    Raises ServerError with the first fault.
    """
    command = [sys.executable, "-m", "llmops.cli", "verify", "--triton", triton, "-m", model, "--quick", "--json"]
    command += ["--metrics", metrics] if metrics else []
    command += ["--engine", engine] if engine else []
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(VERIFY_TIMEOUT):
            out, err = await process.communicate()
    except TimeoutError:
        raise ServerError(f"`llmops verify --quick` of {triton} did not end within {VERIFY_TIMEOUT:g} s.") from None
    finally:
        if process.returncode is None:
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


class CheckedReplicas:
    """Replicas that something else starts: a chart, compose, an operator. Each of them is checked."""

    async def start(self, candidate: ModelVersion, stable: ModelVersion, settings: RolloutSettings) -> StartedReplicas:
        if not candidate.replicas:
            raise InputError(
                "This control starts no replicas. Start them, and name them: `llmops rollout start "
                f"{candidate.model} --replica HOST:PORT`; or use `llmops up` with this store"
            )
        for replica in candidate.replicas:
            # a DNS name is checked through any of its addresses
            server = replica.removeprefix("dns:").rpartition("=")[2].partition("/")[0]
            await verify_quickly(candidate.model, server)
        return StartedReplicas(candidate.replicas)

    async def stop(self, version: ModelVersion, drain_timeout: float) -> None:
        return


class LocalReplicas(CheckedReplicas):
    """Tritons on this machine. They end with `llmops up`, which starts them again."""

    def __init__(
        self,
        start_server: Callable[[Path, int], TritonServer],
        stop_server: Callable[[TritonServer], None],
        folder: Path,
    ) -> None:
        """Create an object without servers.

        Args:
            start_server: Starts a Triton on a repository with an exit timeout, and waits for it.
            stop_server: Drains and stops a Triton.
            folder: Where the repositories of versions go.
        """
        self._start_server, self._stop_server, self._folder = start_server, stop_server, folder
        # engine folder and servers by model and version
        self.engines: dict[tuple[str, str], Path] = {}
        self.servers: dict[tuple[str, str], list[TritonServer]] = {}
        # a server ends with the thread that started it, so this thread stays
        self._thread = ThreadPoolExecutor(1, "version-replicas")

    async def start(self, candidate: ModelVersion, stable: ModelVersion, settings: RolloutSettings) -> StartedReplicas:
        if not candidate.engine:
            return await super().start(candidate, stable, settings)
        key, old = (candidate.model, candidate.name), (stable.model, stable.name)
        if old not in self.servers:
            served = ", ".join(sorted({model for model, _ in self.servers})) or "none"
            raise InputError(f"This `llmops up` has no replicas of {stable.model}; its models are {served}")
        await self._in_thread(self.start_version, candidate, len(self.servers[old]), settings, old)
        servers, engine = self.servers[key], self.engines[key]
        for server in servers:
            await verify_quickly(candidate.model, server.grpc_address, server.metrics_url, str(engine))
        addresses = [server.grpc_address for server in servers]
        stable_addresses = [server.grpc_address for server in self.servers[old]]
        return StartedReplicas(
            addresses, stable_addresses, await self._in_thread(_differences, self.engines[old], engine)
        )

    async def stop(self, version: ModelVersion, drain_timeout: float) -> None:
        servers = self.servers.pop((version.model, version.name), [])
        # a Triton with several models goes on for the others
        shared = [server for key, others in self.servers.items() if key[0] != version.model for server in others]
        servers = [server for server in servers if server not in shared]
        await asyncio.gather(*(asyncio.to_thread(self._stop_server, server) for server in servers))

    def start_version(
        self,
        version: ModelVersion,
        count: int,
        settings: RolloutSettings = RolloutSettings(),
        old: tuple[str, str] = ("", ""),
    ) -> None:
        """Start the missing ones of `count` replicas of a version.

        Where there is no room beside the replicas of `old`, those are stopped first if the settings
        allow it.

        Raises:
            InputError: The engine cannot be served, or there is no room for it.
            ServerError: A Triton does not start.
        """
        from llmops.model_repository.generate import generate_repository, read_engines

        key, engine = (version.model, version.name), Path(version.engine)
        manifest = EngineManifest.load(engine)
        running = self.servers.setdefault(key, [])
        self.engines[key] = engine
        try:
            while len(running) < count:
                self._make_room(manifest, key, old, settings)
                gpus = self._next_gpus(manifest)
                repository = self._folder / f"{version.model}-{version.name}-{len(running)}"
                engines = read_engines((f"{version.model}={engine}",), gpus={version.model: gpus} if gpus else None)
                generate_repository(engines, repository)
                running.append(self._start_server(repository, round(settings.drain_timeout)))
        except BaseException:
            if not running:
                del self.servers[key]
            raise

    def _make_room(
        self, manifest: EngineManifest, key: tuple[str, str], old: tuple[str, str], settings: RolloutSettings
    ) -> None:
        from llmops.model_repository.gpu_assignment import count_gpus

        present, need = count_gpus(), _gpus_of(manifest)
        if not need or present is None or self._used_gpus() + need <= present:
            return
        servers = self.servers.get(old, [])
        if not settings.allow_capacity_loss or not servers:
            left = f"{len(servers) - 1} of {len(servers)}" if servers else "none"
            raise InputError(
                f"No GPU is free beside the replicas of {key[0]}: a replica needs {need}, and {self._used_gpus()} of "
                f"{present} are in use. One by one, {left} replicas would serve meanwhile; to accept that, start the "
                "roll-out with --allow-capacity-loss"
            )
        self._stop_server(servers.pop())

    def _used_gpus(self) -> int:
        found = (
            len(servers) * _gpus_of(EngineManifest.load(self.engines[key])) for key, servers in self.servers.items()
        )
        return sum(found)

    def _next_gpus(self, manifest: EngineManifest) -> tuple[int, ...]:
        """Return the GPUs after those in use, or none for an engine without GPUs."""
        first = self._used_gpus()
        return tuple(range(first, first + _gpus_of(manifest)))

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


def _gpus_of(manifest: EngineManifest) -> int:
    return manifest.parallelism.world_size if TARGETS[manifest.target].gpus else 0


def _differences(old: Path, new: Path) -> str:
    return describe_differences(old, EngineManifest.load(old), new, EngineManifest.load(new))


def describe_differences(old_folder: Path, old: EngineManifest, folder: Path, new: EngineManifest) -> str:
    """Return what is different for clients of a new engine, such as "another tokenizer"."""
    found = []
    if old.limits.max_seq_len != new.limits.max_seq_len:
        found.append(f"a context of {new.limits.max_seq_len} tokens instead of {old.limits.max_seq_len}")
    before, after = old_folder / old.tokenizer.directory, folder / new.tokenizer.directory
    for name, words in (("tokenizer.json", "another tokenizer"), ("chat_template.jinja", "another chat template")):
        if _content(before / name) != _content(after / name):
            found.append(words)
    return " and ".join(found)


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


async def restore_versions(
    store_url: str, replicas: LocalReplicas, models: Mapping[str, Path], base: Sequence[TritonServer]
) -> None:
    """Start the versions that the store has in use, and write the addresses of all of them.

    Args:
        store_url: The store.
        replicas: Where the servers go.
        models: The models of the servers that run already, with their engine folders.
        base: Those servers, which are the replicas of the oldest version.
    """
    from llmops.store.factory import open_store
    from llmops.store.rollouts import INITIAL_VERSION, RETIRED, list_versions, open_rollouts, set_replicas

    async with await open_store(store_url, pool_size=1) as store:
        async with store.read() as connection:
            versions = await list_versions(connection)
            starting = {one.candidate for one in await open_rollouts(connection) if one.state == "starting"}
        for model, engine in models.items():
            own = [version for version in versions if version.model == model]
            oldest = own[0].name if own else INITIAL_VERSION
            replicas.servers[(model, oldest)], replicas.engines[(model, oldest)] = list(base), engine
            for version in own[1:]:
                if version.engine and version.state != RETIRED and version.name not in starting:
                    # in this thread, with which the servers end
                    replicas.start_version(version, len(base))
            serving = max(own, key=lambda version: version.weight, default=None)
            if serving is not None and serving.name != oldest:
                click.echo(
                    f"{model} is served by its version {serving.name} ({serving.engine}), not {engine}.", err=True
                )
            if own and own[0].state == RETIRED and len(models) == 1:
                await replicas.stop(own[0], 0)
            async with store.write() as connection:
                for version in own:
                    servers = replicas.servers.get((model, version.name))
                    if servers is not None:
                        await set_replicas(connection, model, version.name, [one.grpc_address for one in servers])
