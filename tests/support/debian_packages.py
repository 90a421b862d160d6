"""Real servers from Debian's packages, unpacked without root: Prometheus, HAProxy, and the libraries they need."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from llmops.errors import ServerError

CACHE = Path(".cache", "debian")
SECONDS = 180.0


def program(name: str, package: str, *libraries: str) -> list[str]:
    """Return the command that starts `name` of `package`; arguments are appended to it.

    The program needs the packages in `libraries`.

    Each is fetched once into .cache/debian. Raises ServerError where that is not possible: no apt, or no mirror.
    """
    root, *needed = [_unpacked(one) for one in (package, *libraries)]
    found = next((path for path in sorted(root.glob(f"usr/*bin/{name}"))), None)
    if found is None:
        raise ServerError(f"Debian's package {package} has no program {name}.")
    folders = [str(folder) for one in needed for folder in one.glob("usr/lib/*-linux-gnu")]
    return ["env", f"LD_LIBRARY_PATH={':'.join(folders)}", str(found)] if folders else [str(found)]


def _unpacked(package: str) -> Path:
    cache = CACHE.absolute()
    cache.mkdir(parents=True, exist_ok=True)
    place = cache / package
    with open(cache / f"{package}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                _fetch(package, Path(folder))
                os.rename(Path(folder, "files"), place)
    return place


def _fetch(package: str, folder: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise ServerError(f"{package} comes from a Debian package, and there is no apt-get and dpkg-deb here.")
    # a machine whose own lists are empty or old gets some of its own
    lists = ["-o", f"Dir::State::lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"]
    first = _run(["apt-get", "download", package], folder)
    if first is not None:
        Path(folder, "lists", "partial").mkdir(parents=True)
        problem = _run(["apt-get", *lists, "update"], folder) or _run(["apt-get", *lists, "download", package], folder)
        if problem is not None:
            raise ServerError(f"Debian's package {package} cannot be fetched: {first}")
    (archive,) = folder.glob("*.deb")
    problem = _run(["dpkg-deb", "-x", str(archive), "files"], folder)
    if problem is not None:
        raise ServerError(f"Debian's package {package} cannot be unpacked: {problem}")


def _run(command: list[str], folder: Path) -> str | None:
    """Return the last line of a failed command's error output, or None if it succeeded."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"{command[0]} took more than {SECONDS:.0f} s"
    said = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else said[-1] if said else f"exit code {done.returncode}"
