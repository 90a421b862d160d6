"""The verification behind `llmops verify`, without the command line: from options to a report."""

import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import httpx
from grpc import aio

from llmops.build.engine_folder.manifest import FILE_NAME, EngineManifest
from llmops.build.plan.speed.measured_steps import MeasuredSteps
from llmops.connection_errors import check_url, grpc_call_error, http_connection_error, http_status_error
from llmops.contract import ENGINE_SUFFIX, METADATA_PARAMETER
from llmops.errors import InputError, LlmopsError
from llmops.gateway.errors import UnavailableError
from llmops.gateway.interfaces import ModelMetadata
from llmops.gateway.text.tokenizer import TextTokenizer
from llmops.gateway.triton.grpc_client import WRITE_ERRORS, TritonClient
from llmops.gateway.triton.model_metadata import parse_model_metadata
from llmops.input_files import MALFORMED
from llmops.perf.verify import answers, api_checks, capacity, contract, speed
from llmops.perf.verify.api_checks import ApiContext
from llmops.perf.verify.calibrate import calibrate
from llmops.perf.verify.contract.step_stream import DRAIN
from llmops.perf.verify.engine_context import EngineContext
from llmops.perf.verify.findings import CheckOutcome, Finding, VerifyCheck, WrongError, works, wrong
from llmops.perf.verify.host import TritonGauges, device_name
from llmops.perf.verify.probe import Probe
from llmops.perf.verify.report import VerifyReport
from llmops.response_limits import UNCOMPRESSED, bound_async_response
from llmops.untrusted_text import escape_unsafe
from llmops.urls import without_secrets

#: Maximum number of characters of a finding's detail, which may contain a server's message.
MAX_DETAIL_LENGTH = 2000

READY_SECONDS = 3600.0
_ENGINE_PARTS: dict[str, list[VerifyCheck]] = {
    "contract": contract.CHECKS,
    "answers": answers.CHECKS,
    "capacity": capacity.CHECKS,
    "speed": speed.CHECKS,
}


#: Names of the checks of `--quick`. A broken engine, tokenizer or template fails one of them within
#: seconds.
QUICK_CHECKS = frozenset(
    {
        *("input and output tensors", "streamed deltas and the final flag", "token counts", "end id", "stop words"),
        *("tokenizer", "text of an answer", "chat template"),
    }
)


@dataclass(frozen=True)
class VerifyOptions:
    """The options of a verification.

    Attributes:
        engine: Folder of the engine, whose manifest has the properties to check. A Triton is
            started for the engine unless `triton` or `url` names a running server.
        triton: HOST:PORT of Triton's gRPC.
        url: URL of a gateway.
        model: Served name of the model, or None if there is only one.
        api_key: API key for the gateway, or None.
        metrics: URL of Triton's metrics page.
        only: The parts to run.
        quick: True to run only checks that take seconds and do not disturb other requests.
        calibrate: True to measure step times too.
    """

    engine: Path | None = None
    triton: str | None = None
    url: str | None = None
    model: str | None = None
    metrics: str | None = None
    only: tuple[str, ...] = ()
    quick: bool = False
    api_key: str | None = None
    calibrate: bool = False

    def check(self) -> None:
        """Raise InputError for options that cannot be combined."""
        if self.triton and self.url:
            raise InputError("--triton and --url exclude each other; give the one to check.")
        if not (self.engine or self.triton or self.url):
            raise InputError("Nothing is named to check; give --engine ENGINE, --triton HOST:PORT or --url GATEWAY.")
        if self.calibrate and self.url:
            raise InputError("--calibrate measures an engine: give --engine or --triton instead of --url.")
        of = ("gateway",) if self.url else tuple(_ENGINE_PARTS)
        for part in self.only:
            if part not in of:
                through = "a gateway" if self.url else "Triton"
                raise InputError(f"--only {part} cannot be checked through {through}; choose from {', '.join(of)}.")

    def has(self, part: str) -> bool:
        return not self.only or part in self.only


class _EndedError(Exception):
    """The end of the server, after which no check can run."""


Alive = Callable[[], Awaitable[bool]]


class VerifyProgress(Protocol):
    """A receiver of the progress of a verification. The base class does nothing."""

    def begin(self, part: str, name: str) -> None: ...

    def result(self, result: CheckOutcome) -> None: ...


async def verify(options: VerifyOptions, progress: VerifyProgress) -> tuple[VerifyReport, MeasuredSteps | None]:
    """Run all checks.

    Returns:
        The report with any faults, and the measured step times, None without --calibrate.

    Raises:
        InputError: An option is wrong.
        ServerError: There is no server to check.
    """
    options.check()
    begun = time.monotonic()
    manifest = EngineManifest.load(options.engine) if options.engine else None
    if options.url:
        report, measured = await _gateway(options, manifest, progress), None
    elif options.triton:
        report, measured = await _triton(options, options.triton, options.metrics, manifest, False, progress)
    else:
        assert options.engine is not None
        progress.begin("triton", "starting the real Triton on the engine")
        with _served(options.engine) as (address, metrics):
            report, measured = await _triton(options, address, metrics, manifest, True, progress)
    report.seconds = time.monotonic() - begun
    return report, measured


@contextlib.contextmanager
def _served(engine: Path) -> Iterator[tuple[str, str | None]]:
    """Start a Triton with only this engine, and yield its gRPC address and metrics URL."""
    from llmops.model_repository.generate import generate_repository, read_engines
    from llmops.model_repository.launch import Ports, start_triton

    with tempfile.TemporaryDirectory(prefix="llmops-verify-") as folder:
        repository = Path(folder, "repository")
        generate_repository(read_engines([str(engine)]), repository)
        with start_triton(repository, ports=Ports(0, 0, 0), exit_timeout=5, on_log=lambda line: None) as server:
            server.wait_ready(READY_SECONDS)
            yield server.grpc_address, server.metrics_url


async def _triton(
    options: VerifyOptions,
    address: str,
    metrics: str | None,
    manifest: EngineManifest | None,
    owned: bool,
    progress: VerifyProgress,
) -> tuple[VerifyReport, MeasuredSteps | None]:
    async with _client(address) as client:
        try:
            name = await _served_name(client, options.model)
            metadata = await _read_metadata(client, name)
        except UnavailableError as error:
            cause = error.__cause__
            raise grpc_call_error(address, cause if isinstance(cause, aio.AioRpcError) else error) from error
        manifest = manifest or _beside(metadata)
        if options.calibrate and manifest is None:
            raise InputError("--calibrate needs the engine folder: add --engine ENGINE.")
        page = metrics or f"http://{address.rpartition(':')[0]}:8002/metrics"
        probe = await Probe.open(client, name)
        context = EngineContext(probe, metadata, manifest, TritonGauges(page, probe.model), owned)
        report = VerifyReport(name, address, metadata.target, device_name(metadata.target), manifest is not None)
        await _prepare(context)
        measured: list[MeasuredSteps] = []
        with contextlib.suppress(_EndedError):
            for part, checks in _all_parts(options, owned, measured, progress):
                await _carry_out(part, checks, context, report, progress, lambda: client.model_ready(probe.model))
        return report, measured[0] if measured else None


def _all_parts(
    options: VerifyOptions, owned: bool, measured: list[MeasuredSteps], progress: VerifyProgress
) -> Iterator[tuple[str, Sequence[VerifyCheck]]]:
    """Yield the parts in order. The measured step times are stored in `measured`.

    The part `drain` ends the deployment, so it is the last.
    """
    for part, checks in _ENGINE_PARTS.items():
        if options.has(part):
            yield part, [check for check in checks if check.name in QUICK_CHECKS] if options.quick else checks
    if options.quick:
        return

    async def step_times(context: EngineContext) -> Finding:
        assert context.manifest is not None
        measured.append(await calibrate(context, context.manifest, lambda point: progress.begin("calibrate", point)))
        return works(f"{len(measured[0].steps)} of {measured[0].device}")

    if options.calibrate:
        yield "speed", [VerifyCheck("step times", step_times)]
    if owned and options.has("contract"):
        yield "contract", DRAIN


@contextlib.asynccontextmanager
async def _client(address: str) -> AsyncIterator[TritonClient]:
    client = TritonClient(address, timeout=30)
    try:
        yield client
    finally:
        await client.close()


async def _served_name(client: TritonClient, wanted: str | None) -> str:
    """Return the name of the served model.

    Raise InputError if no model is ready, or the requested model is not.
    """
    models = await client.engine_models()
    ready = [name.removesuffix(ENGINE_SUFFIX) for name, state in models.items() if state]
    if wanted is None and len(ready) > 1:
        raise InputError(f"Triton at {client.address} serves {', '.join(ready)}; name one with --model.")
    if not ready or wanted not in (None, *ready):
        what = f"{wanted}{ENGINE_SUFFIX}" if wanted else f"NAME{ENGINE_SUFFIX}"
        raise InputError(f"Triton at {client.address} has no model {what} ready; see the log of `llmops serve`.")
    return wanted or ready[0]


async def _read_metadata(client: TritonClient, name: str) -> ModelMetadata:
    text = await client.metadata_text(name + ENGINE_SUFFIX)
    if not text:
        raise InputError(
            f"{name}{ENGINE_SUFFIX} has no model metadata (no {METADATA_PARAMETER}): it is not from `llmops repo`, so "
            "nothing can be checked. Serve a model repository that `llmops repo` has made."
        )
    return parse_model_metadata(text)


def _beside(metadata: ModelMetadata) -> EngineManifest | None:
    """Return engine.json beside the tokenizer folder that the model's metadata names.

    Return None if that folder is not on this machine.
    """
    folder = Path(metadata.tokenizer_dir).parent
    try:
        return EngineManifest.load(folder) if (folder / FILE_NAME).is_file() else None
    except LlmopsError:
        return None


async def _prepare(context: EngineContext) -> None:
    try:
        await context.prepare()
    except WrongError as error:
        raise LlmopsError(f"{context.probe.model} does not answer ({error}); see Triton's log.") from error


async def _gateway(options: VerifyOptions, manifest: EngineManifest | None, progress: VerifyProgress) -> VerifyReport:
    assert options.url is not None
    base = options.url.rstrip("/")
    base = base if base.endswith("/v1") else f"{base}/v1"
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    folder = options.engine / manifest.tokenizer.directory if options.engine and manifest else None
    check_url(options.url)
    hooks = {"response": [bound_async_response]}
    async with httpx.AsyncClient(
        base_url=base, headers={**UNCOMPRESSED, **headers}, timeout=120, event_hooks=hooks
    ) as http:
        context = ApiContext(http, options.model or "", manifest, TextTokenizer(folder) if folder else None)
        report = VerifyReport(options.model or "", without_secrets(base), "gateway", "", manifest is not None)
        try:
            listed = await http.get("/models")
        except httpx.HTTPError as error:
            raise http_connection_error(base, error) from error
        if listed.status_code in (401, 403, 404):
            raise http_status_error(base, listed.status_code, "")
        with contextlib.suppress(_EndedError):
            await _carry_out("gateway", api_checks.CHECKS, context, report, progress, lambda: _answers(http))
        report.model = escape_unsafe(context.model or report.model)
        return report


async def _answers(http: httpx.AsyncClient) -> bool:
    try:
        await http.get("/models")
    except httpx.HTTPError:
        return False
    return True


async def _carry_out(
    part: str, checks: Sequence[VerifyCheck], subject: Any, report: VerifyReport, progress: VerifyProgress, alive: Alive
) -> None:
    """Run the checks of a part, and add their outcomes to the report.

    Raise _EndedError after a check during which the server ended.
    """
    for check in checks:
        progress.begin(part, check.name)
        begun = time.monotonic()
        finding = await _finding(check, subject)
        ended = finding.verdict == "wrong" and not await alive()
        if ended:
            finding = wrong(_ended(report, finding))
        # The detail may contain text from a server.
        finding = replace(finding, detail=escape_unsafe(finding.detail, MAX_DETAIL_LENGTH))
        result = CheckOutcome(part, check.name, finding, time.monotonic() - begun)
        report.results.append(result)
        progress.result(result)
        if ended:
            raise _EndedError


def _ended(report: VerifyReport, finding: Finding) -> str:
    where = "the gateway" if report.target == "gateway" else "the engine"
    return (
        f"{where} at {report.address} ended during this check ({finding.detail}); see its log. "
        "The later checks did not run"
    )


async def _finding(check: VerifyCheck, subject: Any) -> Finding:
    """Run one check and return its finding.

    Errors of the engine, its server or its gateway are faults.
    """
    try:
        return await check.run(subject)
    except WrongError as error:
        return wrong(str(error))
    except LlmopsError as error:
        return wrong(error.message.rstrip("."))
    except aio.AioRpcError as error:
        return wrong(f"Triton broke off: {error.details() or error.code().name}")
    except (*WRITE_ERRORS, httpx.HTTPError, httpx.InvalidURL) as error:
        return wrong(f"the connection broke: {error or type(error).__name__}")
    except MALFORMED as error:
        return wrong(f"the answer does not have the form of the contract ({type(error).__name__}: {error})")
