"""The parts of `llmops up`: an engine, a repository, Triton and the gateway.

Triton and the gateway end together.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import click

from llmops.background_output import write_in_background
from llmops.build.engine_folder.manifest import FILE_NAME
from llmops.build.job.build_engine import build
from llmops.build.spec import BuildSpec
from llmops.build.target_facts import TargetName
from llmops.cache import cache_dir, check_own_folders
from llmops.cli.accounts.admin_client import current_audit_context, default_store
from llmops.cli.output import print_line
from llmops.cli.progress import make_progress
from llmops.cli.service.command_defaults import default_quant, name_model, repo_defaults, spec_of
from llmops.cli.service.service_file import LoadedService
from llmops.errors import InputError, ServerError
from llmops.gateway.auth.authentication import keys_required
from llmops.gateway.http.server import bind
from llmops.gateway.logging_setup import configure_logging
from llmops.gateway.safety.policy import check_filters
from llmops.gateway.settings import GatewaySettings, SamplingSettings, SettingsLayers, load_settings
from llmops.model_repository.generate import generate_repository, read_engines
from llmops.model_repository.launch import Ports, TritonServer, gpus_of_replicas, start_triton
from llmops.model_repository.repository.compatibility import check_target
from llmops.model_repository.server.exposure import describe_stack_exposure
from llmops.model_repository.server.fault_watch import FaultSources, RestartBudget
from llmops.model_repository.server.triton_log import LogLine
from llmops.output_files import check_not_put_by_another
from llmops.urls import is_loopback

if TYPE_CHECKING:
    from llmops.cli.local_replicas import LocalReplicas
    from llmops.gateway.app import Plugin

#: Tenant and user that own the first key of a store.
FIRST_TENANT = "default"
FIRST_USER = "admin@localhost"

#: Maximum number of restarts of a Triton within 10 minutes, the default of `llmops serve`.
MAX_RESTARTS = 3
#: Seconds without a step after which a busy Triton counts as hanging, as in `llmops serve`.
HANG_TIMEOUT = 120.0


def is_engine_folder(checkpoint: str) -> bool:
    """Return True if `checkpoint` names a folder that `llmops build` made."""
    return Path(checkpoint, FILE_NAME).is_file()


def build_engine(
    checkpoint: str, target: TargetName, quant: str | None, tp: int, name: str | None, folder: Path | None
) -> Path:
    """Return the engine folder of `checkpoint`, built if it does not exist yet."""
    if is_engine_folder(checkpoint):
        return Path(checkpoint)
    check_target(target)
    quant = quant or default_quant(checkpoint, target)
    place = folder or cache_dir() / "up" / f"{_slug(checkpoint)}-{target}-{quant}-tp{tp}"
    made = _make_folder(place)
    if folder is None:
        check_own_folders(place, cache_dir())
    spec = BuildSpec(checkpoint=checkpoint, output=place / "engine", target=target, quant=quant, tp=tp, name=name)
    try:
        build(spec, make_progress())
    except BaseException:
        if made:
            with contextlib.suppress(OSError):
                # remove the folder only if it is empty, because finished stages stay for the next
                # attempt
                place.rmdir()
        raise
    return spec.output


def _make_folder(place: Path) -> bool:
    """Create a folder. Return False if the folder existed."""
    made = not place.exists()
    try:
        place.mkdir(parents=True, exist_ok=True)
        check_not_put_by_another(place)
    except OSError as error:
        raise InputError(f"{place} cannot be written ({error.strerror}); choose another folder with --dir.") from error
    return made


@dataclass(frozen=True)
class Ready:
    """The facts that `llmops up` announces when everything runs.

    `exposure` has the lines that say who can reach which server. `keys_needed` is True if the
    gateway requires keys.
    """

    url: str
    models: Sequence[str]
    exposure: str
    keys_needed: bool


def build_described(loaded: LoadedService, tenants_apart: bool = False) -> tuple[Path, Mapping[str, Path]]:
    """Build the missing engines of a service, and make its repository.

    Return the repository's folder, and the models with their engine folders. `tenants_apart` is
    True if the gateway keeps the cached prefixes of tenants apart.
    """
    specs = {}
    for name in loaded.service.models:
        with name_model(loaded, name):
            specs[name] = spec_of(loaded, name)
        check_target(specs[name].target)
    for name, spec in specs.items():
        _make_folder(spec.output.parent)
        with name_model(loaded, name):
            build(spec, make_progress())
    engines = read_engines(repo_defaults(loaded)["engines"], serving=loaded.serving, tenants_apart=tenants_apart)
    generate_repository(engines, loaded.repository)
    return loaded.repository, {name: spec.output for name, spec in specs.items()}


def make_repository(
    engine: Path, folder: Path | None, serving: str = "", tenants_apart: bool = False, name: str | None = None
) -> tuple[Path, Mapping[str, Path]]:
    """Make a Triton model repository in `folder`, or beside the engine.

    Return the repository's folder, and the models with their engine folders. `tenants_apart` is
    True if the gateway keeps the cached prefixes of tenants apart. The engine is served under
    `name`, or under the name that its build gave it.

    Raises:
        InputError: The repository beside the engine is a symbolic link, which may have come with
            the engine and lead to a repository that is in use.
    """
    repository = (folder or engine.absolute().parent) / f"{engine.absolute().name}-repository"
    if folder is None and repository.is_symlink():
        raise InputError(f"{repository} is a symbolic link; remove it, or name a folder with --dir.")
    engines = read_engines((f"{name}={engine}" if name else str(engine),), serving=serving, tenants_apart=tenants_apart)
    generate_repository(engines, repository)
    return repository, {engine.name: engine.directory for engine in engines}


def _slug(checkpoint: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in checkpoint.strip("/")).strip("-")[-80:]


class Stack:
    """A context manager that runs Triton servers and the gateway, and ends them.

    SIGTERM acts like Ctrl-C.
    """

    def __init__(
        self,
        host: str | None,
        port: int | None,
        config: Path | SettingsLayers | None,
        store: str | None,
        open_: bool | None,
        max_tokens: int | None = None,
        plugins: Sequence[Plugin] = (),
    ) -> None:
        """Read the settings, and check the safety filters, the port and the store.

        The checks happen before minutes of building.

        Args:
            host: The gateway's address. None takes the address of the settings; `port`, `store`
                and `open_` treat None in the same way.
            port: The gateway's port.
            config: The gateway's settings.
            store: The store's URL. A gateway that others can reach gets one by default, and its
                first key in `first_key`.
            open_: True to require no keys.
            max_tokens: The default maximum tokens of an answer, if neither the request nor the
                settings name a limit.
            plugins: Plugins that the gateway loads in addition to its own.
        """
        self._settings = load_settings(config, host=host, port=port, store=store, open=open_, log_level="warning")
        if self._settings.sampling.max_tokens is None and max_tokens is not None:
            self._settings = self._settings.model_copy(update={"sampling": SamplingSettings(max_tokens=max_tokens)})
        check_filters(self._settings.safety)
        host = self._settings.host
        bind(host, self._settings.port).close()
        self.first_key = ""
        if not self._settings.open and not is_loopback(host):
            url = self._settings.store or default_store()
            self._settings = self._settings.model_copy(update={"store": url})
            self.first_key = create_first_key(url)
        keys_required(self._settings)
        self._exit = contextlib.ExitStack()
        self._failure: ServerError | None = None
        self._running, self._plugins = 0, plugins
        self._leaving = threading.Event()
        self._forced = False
        self._early_signal = 0
        # Triton servers, each with an event that is set when its end is intended
        self._tritons: dict[TritonServer, threading.Event] = {}
        self._counting = threading.Lock()
        self._versions: LocalReplicas | None = None

    def __enter__(self) -> Stack:
        signal.signal(signal.SIGTERM, _interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.set()
        for leaving in self._tritons.values():
            leaving.set()
        _on_signals(_end_now)
        if self._forced:
            for triton in list(self._tritons):
                triton.stop(at_once=True)
        self._exit.close()

    def start_tritons(self, repository: Path, count: int) -> None:
        """Start Triton servers, each on different GPUs, and wait until they are ready.

        Raises:
            ResourceError: The machine has too few GPUs.
            ServerError: A model does not load; the message has Triton's reason.
        """
        write_in_background()
        shares = gpus_of_replicas(repository, count)
        for triton in [self._start(repository, visible_gpus=gpus) for gpus in shares]:
            self._await(triton)

    @property
    def tenants_apart(self) -> bool:
        """Return True if the gateway keeps the cached prefixes of tenants apart."""
        return self._settings.tenants_apart

    def start_versions(self, models: Mapping[str, Path], folder: Path) -> None:
        """Let roll-outs start and stop replicas, and start the versions that the store has in use.

        Args:
            models: The models of the repository with their engine folders.
            folder: The folder for the repositories of versions.

        Raises:
            ServerError: A version does not start.
        """
        if self._settings.store is None or self._settings.workers > 1:
            return
        from llmops.cli.local_replicas import LocalReplicas, restore_versions

        self._versions = LocalReplicas(self._start_and_wait, self._stop, folder, self.tenants_apart)
        asyncio.run(restore_versions(self._settings.store, self._versions, models, list(self._tritons)))

    def _start(self, repository: Path, **options: Any) -> TritonServer:
        triton = start_triton(repository, ports=Ports(0, 0, 0), on_log=_print_problems, **options)
        self._tritons[triton] = threading.Event()
        self._exit.callback(self._stop, triton)
        return triton

    def _await(self, triton: TritonServer) -> None:
        triton.wait_ready()
        with self._counting:
            self._running += 1
        threading.Thread(target=self._watch, args=[triton], name="watch-triton", daemon=True).start()

    def _start_and_wait(self, repository: Path, exit_timeout: int) -> TritonServer:
        triton = self._start(repository, exit_timeout=exit_timeout)
        try:
            self._await(triton)
        except BaseException:
            self._stop(triton)
            raise
        return triton

    def _stop(self, triton: TritonServer, timeout: float | None = None) -> None:
        leaving = self._tritons.pop(triton, None)
        if leaving is not None:
            leaving.set()
            triton.stop(timeout=timeout)
            with self._counting:
                self._running -= 1

    def run_gateway(self, models: Sequence[str], on_ready: Callable[[Ready], None]) -> None:
        """Serve until Ctrl-C, SIGTERM, or until the last Triton has ended too often.

        Raises:
            ServerError: The last Triton ended too often.
            click.Abort: A second signal ended the gateway.
        """
        from llmops.gateway.launcher import run

        configure_logging("warning")
        addresses = [triton.grpc_address for triton in self._tritons]
        # during a roll-out, a model has several servers
        is_single = len(addresses) == 1 and self._versions is None
        where = {"triton": addresses[0]} if is_single else {"replicas": addresses}
        settings = self._settings.model_copy(update=where)
        # uvicorn handles both signals after the gateway's imports, and raises them again at its end
        _on_signals(self._remember)

        def listening(url: str, keys_needed: bool) -> None:
            self._announce_when_ready(Ready(url, models, self._exposure(url, keys_needed), keys_needed), on_ready)

        self._forced = run(settings, listening, [*_control_plugins(settings, self._versions), *self._plugins])
        if self._failure is not None:
            raise self._failure
        if self._forced:
            raise click.Abort

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self._early_signal = number

    def _announce_when_ready(self, ready: Ready, on_ready: Callable[[Ready], None]) -> None:
        def wait() -> None:
            while not self._leaving.is_set():
                with contextlib.suppress(urllib.error.URLError, OSError):
                    urllib.request.urlopen(f"{ready.url}/health/ready", timeout=30).close()
                    if not self._early_signal:
                        on_ready(ready)
                        return
                if self._early_signal and signal.getsignal(signal.SIGTERM) != self._remember:
                    # from here on, the server handles signals
                    os.kill(os.getpid(), self._early_signal)
                    return
                self._leaving.wait(0.1)

        threading.Thread(target=wait, name="announce", daemon=True).start()

    def _exposure(self, url: str, keys_needed: bool) -> str:
        first = next(iter(self._tritons))
        grpc, metrics = first.grpc_address, str(first.metrics_url)
        return describe_stack_exposure(self._settings.host, url, grpc, metrics, keys=keys_needed)

    def _watch(self, triton: TritonServer) -> None:
        """Start a Triton again when it ends or hangs, until its restarts exceed the limit."""
        leaving, budget = self._tritons.get(triton, self._leaving), RestartBudget(MAX_RESTARTS)
        sources = FaultSources(hang_timeout=HANG_TIMEOUT)
        while True:
            try:
                triton.wait(leaving, sources)
                break
            except ServerError as error:
                if not self._restart(triton, leaving, budget, error):
                    self._give_up(triton, f"{error} {budget.spent_message}.")
                    return
        # a Triton that this thread has started ends with it
        triton.process.wait()

    def _restart(
        self, triton: TritonServer, leaving: threading.Event, budget: RestartBudget, error: ServerError
    ) -> bool:
        while not leaving.is_set() and budget.take(time.monotonic()):
            print_line(f"{error} Starting it again.", err=True)
            try:
                triton.restart()
                triton.wait_ready(cancelled=leaving)
            except ServerError as failure:
                error = failure
            else:
                return True
        return leaving.is_set()

    def _give_up(self, triton: TritonServer, problem: str) -> None:
        # open answers of this Triton end with an error; the gateway ends with the last Triton
        self._stop(triton)
        if not self._running:
            self._failure = ServerError(problem)
            signal.raise_signal(signal.SIGTERM)
        else:
            print_line(f"{problem} The other replicas continue.", err=True)


def create_first_key(url: str) -> str:
    """Create a key with all scopes in a store that never had a key.

    Return the key's secret, or an empty text if the store had a key.
    """
    return asyncio.run(_create_first_key(url))


async def _create_first_key(url: str) -> str:
    by = current_audit_context()
    from llmops.store.accounts.keys import SCOPES, KeySpec, create_key, has_any_key
    from llmops.store.accounts.limits import Limits
    from llmops.store.accounts.tenants import create_tenant, find_tenant
    from llmops.store.accounts.users import ensure_user
    from llmops.store.factory import open_store

    async with await open_store(url, pool_size=1) as store, store.write() as connection:
        if await has_any_key(connection):
            return ""
        if await find_tenant(connection, FIRST_TENANT) is None:
            await create_tenant(connection, FIRST_TENANT, Limits(), by)
        owner = await ensure_user(connection, FIRST_TENANT, FIRST_USER, by)
        _, secret = await create_key(connection, owner, KeySpec(name="first", scopes=SCOPES), by)
        return secret


def _control_plugins(settings: GatewaySettings, versions: LocalReplicas | None) -> Sequence[Plugin]:
    """Return the plugin that does the work of `llmops control`, if there is a store."""
    if settings.store is None:
        return ()
    from llmops.cli.local_replicas import CheckedReplicas
    from llmops.control.app import control_plugin, make_leader_jobs

    replicas = versions or CheckedReplicas(settings.replicas or [settings.triton])
    return (control_plugin(settings, lambda: make_leader_jobs(settings, replicas)),)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _end_now(_signal: int, _frame: FrameType | None) -> None:
    """Stop waiting for open answers, and ignore signals, so that no server is left behind."""
    _on_signals(signal.SIG_IGN)
    raise KeyboardInterrupt


def _on_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _print_problems(line: LogLine) -> None:
    if line.level in ("error", "warning") and not line.is_noise:
        print(line, flush=True)
