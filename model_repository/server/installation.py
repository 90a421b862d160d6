"""The search for the tritonserver that is installed on this machine.

The program is the container's tritonserver, or the binary inside the nvidia-pytriton wheel.

The wheel is unpacked and never imported, because its Python API is not used. docs/serve.md explains
each path.
"""

import ctypes.util
import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from llmops.build.environment import installed_version
from llmops.cache import cache_dir, check_own_folders
from llmops.distribution import missing_extra
from llmops.errors import MissingDependencyError, ResourceError
from llmops.model_repository.server.command import LaunchOptions, ServerOptions

CONTAINER_ROOT = Path("/opt/tritonserver")
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
STUB_NAME = "triton_python_backend_stub"
#: The first version of Python for which the extra `embedded` does not install nvidia-pytriton.
FIRST_PYTHON_WITHOUT_NUMPY_1 = (3, 13)


@dataclass(frozen=True)
class Installation:
    """A tritonserver that can be started.

    `kind` is `container` or `embedded`. `backends` is the value of --backend-directory.
    `environment` has the variables that the server needs in addition to the caller's.
    """

    kind: str
    binary: Path
    backends: Path
    environment: dict[str, str]

    def server_options(self, repository: Path, options: LaunchOptions) -> ServerOptions:
        """Return the options of a server on `repository`.

        The HTTP server of the nvidia-pytriton wheel (Triton 2.51) listens on this machine only,
        because a body of many small chunks ends the server with SIGSEGV, even if its APIs are
        restricted (CVE-2025-23310 and 23311, fixed in 25.07).
        """
        http_host = options.host if self.kind == "container" else "127.0.0.1"
        return ServerOptions(
            binary=str(self.binary),
            repository=str(repository.resolve()),
            launch=options,
            backends=str(self.backends),
            http_host=http_host if options.http else "",
        )


def container_installation() -> Installation:
    """Return the server of NVIDIA's images, even if this machine does not have it."""
    binary, backends = CONTAINER_ROOT / "bin" / "tritonserver", CONTAINER_ROOT / "backends"
    return Installation("container", binary, backends, {"PATH": _path_with_venv()})


def find_installation() -> Installation:
    """Return the container's server, or the wheel's. Raise MissingDependencyError without a server."""
    if (CONTAINER_ROOT / "bin" / "tritonserver").is_file():
        return container_installation()
    root = find_wheel()
    check_numpy()
    binary = find_binary(root)
    stub, library = find_stub(root), find_libpython()
    return Installation("embedded", binary, _assemble_backends(root, stub), _environment(root, library))


def is_tensorrt_llm_installed() -> bool:
    """Return True if TensorRT-LLM is installed for this Python, as it is in our image."""
    return bool(installed_version("tensorrt_llm"))


def find_wheel() -> Path:
    """Return the `tritonserver` folder inside the installed nvidia-pytriton wheel.

    Raises MissingDependencyError if the wheel is not installed.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        missing = "No Triton server: neither /opt/tritonserver nor nvidia-pytriton is installed"
        if sys.version_info >= FIRST_PYTHON_WITHOUT_NUMPY_1:
            raise MissingDependencyError(
                f"{missing}; nvidia-pytriton needs NumPy 1, which has no wheels for Python {PYTHON_VERSION}: install "
                "llmops with Python 3.12 or 3.11"
            )
        raise missing_extra(missing, "embedded")
    return Path(next(iter(spec.submodule_search_locations))) / "tritonserver"


def check_numpy() -> None:
    """Raise MissingDependencyError if the installed numpy would crash the Python backend.

    With numpy 2, the wheel's Python backend crashes on the first string tensor.
    """
    found = installed_version("numpy")
    if found and int(found.partition(".")[0]) >= 2:
        raise MissingDependencyError(
            f"numpy {found} is installed, and the Python backend of nvidia-pytriton's Triton crashes with it: "
            "`pip install 'numpy<2'`; a library that needs numpy 2 must be installed for a separate Python "
            "(see docs/tensorrt-llm.md)"
        )


def find_binary(root: Path) -> Path:
    """Return the tritonserver program of the wheel. Raise MissingDependencyError if missing."""
    binary = root / "bin" / "tritonserver"
    if not _is_file(binary):
        raise MissingDependencyError(
            f"The Triton binary {binary} is missing: reinstall it with `pip install --force-reinstall nvidia-pytriton`"
        )
    return binary


def _is_file(path: Path) -> bool:
    """Return True if `path` is a file.

    Raises MissingDependencyError if this user cannot read it, as in another user's environment.
    """
    try:
        return path.is_file()
    except PermissionError as error:
        raise MissingDependencyError(
            f"{path} cannot be read by this user ({error.strerror}): run llmops as the user who installed "
            "it, or install llmops in an environment of your own"
        ) from error


def find_stub(root: Path) -> Path:
    """Return the Python backend's stub for the running Python version."""
    stub = root / "python_backend_stubs" / PYTHON_VERSION / STUB_NAME
    if not _is_file(stub):
        have = ", ".join(sorted(p.name for p in stub.parent.parent.glob("3.*"))) or "none"
        raise MissingDependencyError(
            f"Triton's Python backend has no stub for Python {PYTHON_VERSION}, only for {have}: use one of "
            "those versions, or reinstall nvidia-pytriton"
        )
    return stub


def find_libpython() -> Path | None:
    """Return the folder of libpythonX.Y.so.1.0, to be added to the loader's search path.

    The result is None if the loader finds the library without it.
    """
    soname = f"libpython{PYTHON_VERSION}.so.1.0"
    folders = [sysconfig.get_config_var("LIBDIR"), *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    for folder in filter(None, folders):
        if (Path(folder) / soname).is_file():
            return Path(folder)
    if ctypes.util.find_library(f"python{PYTHON_VERSION}"):
        return None
    raise MissingDependencyError(
        f"{soname} cannot be loaded, but Triton's Python models need it: install it "
        f"(Debian and Ubuntu: `apt-get install libpython{PYTHON_VERSION}`) or add its folder to LD_LIBRARY_PATH"
    )


def check_stub_links(stub: Path, environment: dict[str, str]) -> list[str]:
    """Return the names of libraries that the stub needs and the loader does not find."""
    result = subprocess.run(
        ["ldd", str(stub)], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    return [line.split()[0] for line in result.stdout.splitlines() if "not found" in line]


def _environment(root: Path, library: Path | None) -> dict[str, str]:
    # search the caller's folders first: in NVIDIA's images they contain the libcuda for forward
    # compatibility, while libpython's folder has the driver's older libcuda
    folders = [os.environ.get("LD_LIBRARY_PATH"), root.parents[1] / "nvidia_pytriton.libs", library]
    return {
        "LD_LIBRARY_PATH": ":".join(str(folder) for folder in folders if folder),
        "PATH": _path_with_venv(),
    }


def _path_with_venv() -> str:
    # the stub's isolated interpreter ignores PYTHONPATH and finds our packages through the first
    # python3 on PATH
    return f"{Path(sys.prefix) / 'bin'}:{os.environ.get('PATH', os.defpath)}"


def _assemble_backends(root: Path, stub: Path) -> Path:
    """Return a backend folder that consists of links.

    The links lead to the wheel's Python backend and the stub for this Python version. The folder
    lies in the user's cache. The folder's name is a digest of the link targets, so all servers
    share the folder.
    """
    key = hashlib.sha256(f"{root}:{stub}".encode()).hexdigest()[:16]
    backends = cache_dir() / "triton-backends" / key
    target = backends / "python"
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = os.strerror(errno.ENOTDIR) if isinstance(error, FileExistsError) else error.strerror
        raise ResourceError(
            f"{target} cannot be created ({reason}); remove any file at this path, or set LLMOPS_CACHE to "
            "another folder."
        ) from error
    check_own_folders(target, cache_dir())
    sources = [*(root / "backends" / "python").glob("*.*"), stub]
    # Remove byte code, which the stub's interpreter wrote at an earlier start, or another user put
    # there. A server that starts at the same time compiles it again.
    shutil.rmtree(target / "__pycache__", ignore_errors=True)
    for entry in target.iterdir():
        if entry.name == "__pycache__" and entry.lstat().st_uid == os.getuid():
            continue
        is_known = entry.name in {source.name for source in sources} or entry.name.startswith(".")
        if not is_known or (entry.is_dir() and not entry.is_symlink()):
            raise ResourceError(f"{entry} is not a file of Triton's Python backend; remove it.")
    for source in sources:
        link = target / source.name
        if not link.is_symlink() or link.readlink() != source or not link.exists():
            scratch = target / f".{source.name}.{os.getpid()}"
            scratch.unlink(missing_ok=True)
            scratch.symlink_to(source)
            scratch.replace(link)
    return backends
