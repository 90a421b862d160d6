"""Checks of the requirements of `llmops serve` on this machine.

Each check names the fix for a missing part.
"""

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from llmops import __version__
from llmops.build.environment import installed_version
from llmops.distribution import DISTRIBUTION_NAME, PACKAGE_DIR, foreign_distributions, install_command, repair_command
from llmops.errors import LlmopsError
from llmops.model_repository.doctor import CheckResult, CheckStatus, collectives, image
from llmops.model_repository.server import installation

#: For each extra: a module that only this extra installs, and the commands that need it.
EXTRAS = {
    "embedded": ("openvino_genai", "build --target openvino, and serve without NVIDIA's image"),
    "quantize": ("modelopt", "build --target tensorrt or pytorch, and eval"),
    "export": ("nncf", "build --target openvino of families other than Llama, Mistral, Qwen 2/3"),
    "silicon": ("aiconfigurator", "plan with times measured on silicon"),
    "store": ("sqlalchemy", "key, tenant, price, usage, audit and control: keys, limits and usage"),
    "oidc": ("jwt", "the gateway's setting `oidc`: tokens of an identity provider"),
    "redis": ("redis", "the gateway's setting `redis`: limits that several gateways share"),
    "kafka": ("aiokafka", "the gateway's setting `kafka`: usage by way of Kafka"),
    "safety": ("re2", "the gateway's setting `safety`: rules for prompts and answers"),
    "otel": ("opentelemetry.proto", "the gateway's setting `traces`"),
}
#: Minimum bytes of free disk space: room for the engine of a small model.
MIN_DISK = 5 << 30
#: Minimum bytes of /dev/shm for Triton's Python backend with a few models. Each model takes 1 MiB
#: at the start and more under load.
MIN_SHM = 256 << 20
PORTS = {"Triton HTTP": 8000, "Triton gRPC": 8001, "Triton metrics": 8002, "gateway": 9000}


def check_machine() -> Iterator[CheckResult]:
    """Yield all checks, in the order in which `llmops serve` would fail."""
    in_container = installation.CONTAINER_ROOT.is_dir()
    yield _python()
    yield _distribution()
    yield from _gpu(required=in_container or installation.is_tensorrt_llm_installed())
    if in_container:
        yield from image.check_container()
    elif installation.is_tensorrt_llm_installed():
        yield image.check_tensorrt_llm()
    yield from _triton()
    yield from _extras()
    yield from (_port(name, port) for name, port in PORTS.items())
    yield _disk()
    yield _shared_memory()


def _python() -> CheckResult:
    found = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    return CheckResult("Python", "ok", f"{found}, {sys.prefix}")


def _distribution() -> CheckResult:
    foreign = foreign_distributions()
    if foreign:
        detail = f"{', '.join(foreign)} has installed files into the package llmops, but is not part of it"
        return CheckResult(DISTRIBUTION_NAME, "not ok", detail, repair_command(foreign))
    return CheckResult(DISTRIBUTION_NAME, "ok", f"{__version__}, {PACKAGE_DIR}")


def _gpu(required: bool) -> Iterator[CheckResult]:
    missing: CheckStatus = "not ok" if required else "note"
    program = shutil.which("nvidia-smi")
    if program is None:
        fix = "start the container with `--gpus all`" if required else "needed only for --target tensorrt and pytorch"
        yield CheckResult("GPU", missing, "none (no nvidia-smi)", fix)
        return
    query = [program, "--query-gpu=name,memory.total,compute_cap,driver_version", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    rows = [[cell.strip() for cell in line.split(",")] for line in result.stdout.splitlines() if line.count(",") == 3]
    if result.returncode or not rows:
        reason = (result.stderr or result.stdout).strip().splitlines()
        yield CheckResult(
            "GPU", missing, reason[0] if reason else "nvidia-smi failed", "install or restart the NVIDIA driver"
        )
        return
    for index, (name, memory, capability, _) in enumerate(rows):
        yield CheckResult(f"GPU {index}", "ok", f"{name}, {memory}, compute capability {capability}")
    yield image.check_driver(rows[0][3], required)
    if len(rows) > 1:
        yield from collectives.check_collectives()


def _triton() -> Iterator[CheckResult]:
    if installation.CONTAINER_ROOT.is_dir():
        yield _attempt("Triton", lambda: f"{installation.find_installation().binary} (container)")
        return
    wheel = _attempt("Triton", _wheel_binary)
    yield wheel
    if wheel.status != "ok":
        return
    root = installation.find_wheel()
    yield _attempt("libpython", lambda: str(installation.find_libpython() or "found by the loader"))
    yield _stub(root)
    yield _attempt("numpy", _numpy)


def _wheel_binary() -> str:
    binary = installation.find_binary(installation.find_wheel())
    return f"{binary} (nvidia-pytriton {installed_version('nvidia-pytriton')})"


def _numpy() -> str:
    installation.check_numpy()
    return f"{installed_version('numpy')}, but the wheel's Python backend needs a version below 2"


def _stub(root: Path) -> CheckResult:
    try:
        stub = installation.find_stub(root)
        missing = installation.check_stub_links(stub, installation.find_installation().environment)
    except LlmopsError as error:
        return CheckResult("Python backend stub", "not ok", "", error.message)
    if missing:
        return CheckResult(
            "Python backend stub", "not ok", f"cannot load {', '.join(missing)}", "install these libraries"
        )
    return CheckResult("Python backend stub", "ok", f"for Python {installation.PYTHON_VERSION}")


def _extras() -> Iterator[CheckResult]:
    for extra, (module, use) in EXTRAS.items():
        if _is_installed(module):
            yield CheckResult(f"extra {extra}", "ok", f"installed; for {use}")
        else:
            has_other_engine = installation.CONTAINER_ROOT.is_dir() or installation.is_tensorrt_llm_installed()
            needed = extra == "embedded" and not has_other_engine
            status: CheckStatus = "not ok" if needed else "note"
            yield CheckResult(f"extra {extra}", status, f"not installed; for {use}", install_command(extra))


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        # find_spec raises this if the package that contains the module is missing
        return False


def _port(name: str, port: int) -> CheckResult:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            fix = "stop what listens there, or choose another port with the command's --…-port option"
            return CheckResult(f"port {port}", "note", f"{name}: {error.strerror}", fix)
    return CheckResult(f"port {port}", "ok", f"{name}: free")


def _disk() -> CheckResult:
    free = shutil.disk_usage(Path.cwd()).free
    if free < MIN_DISK:
        return CheckResult(
            "disk here", "not ok", f"{_gib(free)} free", f"engines need disk space: free at least {_gib(MIN_DISK)}"
        )
    return CheckResult("disk here", "ok", f"{_gib(free)} free")


def _shared_memory() -> CheckResult:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return CheckResult(
            "/dev/shm", "not ok", str(error.strerror), "Triton's Python models need it: mount a tmpfs there"
        )
    if free < MIN_SHM:
        return CheckResult(
            "/dev/shm", "not ok", f"{_gib(free)} free", "start the container with `--shm-size=1g` or more"
        )
    return CheckResult("/dev/shm", "ok", f"{_gib(free)} free")


def _attempt(name: str, find: Callable[[], str]) -> CheckResult:
    try:
        return CheckResult(name, "ok", find())
    except LlmopsError as error:
        return CheckResult(name, "not ok", "", error.message)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
