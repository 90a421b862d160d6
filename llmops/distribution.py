"""The installed distribution: its name, its origin, and the commands that install its extras.

The origin is the folder or wheel from which pip installed this copy. The command and the package
are called `llmops`. The distribution is called `llmops-triton`, because the name `llmops` belongs
to another project on PyPI. That project's distribution also contains a package `llmops`, so its
installation overwrites files of this one.
"""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from llmops.errors import MissingDependencyError

DISTRIBUTION_NAME = "llmops-triton"
PACKAGE_DIR = Path(__file__).parent


def missing_extra(what: str, extra: str) -> MissingDependencyError:
    """Return the error for a missing library.

    Args:
        what: A clause without a full stop that names the library and the feature that needs it.
        extra: The extra of this distribution that installs the library.
    """
    return MissingDependencyError(f"{what}; install it with: {install_command(extra)}")


def install_command(*extras: str) -> str:
    """Return the shell command that installs `extras` for this copy of llmops.

    The command names the checkout or wheel from which this copy was installed, and its constraints.
    If the checkout or wheel is gone, the command names the libraries of the extras, with the
    versions in the installed metadata.
    """
    return shlex.join([*_pip(), "install", *(_from_source(extras) or _requirements(extras))])


def foreign_distributions(names: Iterable[str] | None = None) -> list[str]:
    """Return the name and version of each other distribution with files in the package `llmops`.

    Args:
        names: Names of the distributions to check. None checks all installed ones, which reads a
            file of each.
    """
    if names is None:
        candidates: Iterable[metadata.Distribution] = metadata.distributions()
    else:
        candidates = [found for name in names for found in metadata.distributions(name=name)]
    others = [other for other in candidates if _normalised(other.name) != DISTRIBUTION_NAME]
    return sorted({f"{other.name} {other.version}" for other in others if _has_our_files(other)})


def llmops_command() -> str:
    """Return the command that runs the `llmops` of this copy.

    The command is a path if PATH has no `llmops`, or the `llmops` of another copy.
    """
    own = Path(sys.executable).parent / "llmops"
    found = shutil.which("llmops")
    if not own.exists() or (found is not None and Path(found).parent.resolve() == own.parent.resolve()):
        return "llmops"
    return str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own)


def repair_command(foreign: Iterable[str]) -> str:
    """Return the shell commands that restore this distribution's files.

    Args:
        foreign: The names of the distributions to remove first.
    """
    remove = shlex.join([*_pip(), "uninstall", "--yes", *(name.partition(" ")[0] for name in foreign)])
    source = _from_source(())
    if source is None:
        return f"{remove}, then install the wheel of {DISTRIBUTION_NAME} again with --force-reinstall --no-deps"
    return f"{remove} && {shlex.join([*_pip(), 'install', '--force-reinstall', '--no-deps', *source])}"


def _pip() -> list[str]:
    """Return the command line of this Python's pip. The program `pip` may belong to another Python."""
    pip = shutil.which("pip")
    if pip is not None and Path(pip).parent == Path(sys.executable).parent:
        return ["pip"]
    return [sys.executable, "-m", "pip"]


def _from_source(extras: tuple[str, ...]) -> list[str] | None:
    """Return the arguments of `pip install` that name the source of this copy.

    Return None if the source no longer exists.
    """
    checkout = PACKAGE_DIR.parent
    editable = (checkout / "pyproject.toml").is_file()
    source = checkout if editable else _origin()
    if source is None:
        return None
    constraints = (source if source.is_dir() else source.parent) / "constraints.txt"
    options = ["-c", _relative(constraints)] if constraints.is_file() else []
    wanted = f"{_relative(source)}[{','.join(extras)}]" if extras else _relative(source)
    return [*options, *(["-e"] if editable else []), wanted]


def _relative(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _origin() -> Path | None:
    """Return the folder or wheel from which pip installed this copy.

    Return None if the origin is unknown or no longer exists.
    """
    installed = _installed()
    record = installed.read_text("direct_url.json") if installed else None
    url = urlsplit(json.loads(record).get("url", "") if record else "")
    path = Path(unquote(url.path))
    return path if url.scheme == "file" and path.exists() else None


def _requirements(extras: tuple[str, ...]) -> list[str]:
    """Return the requirements of `extras`, or of the base install, from the installed metadata."""
    installed = _installed()
    wanted = []
    for line in (installed.requires if installed else None) or ():
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        of_extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        if of_extra[1] in extras if of_extra else not extras:
            wanted.append(requirement)
    return wanted or [f"{DISTRIBUTION_NAME}[{','.join(extras)}]" if extras else DISTRIBUTION_NAME]


def _installed() -> metadata.Distribution | None:
    try:
        return metadata.distribution(DISTRIBUTION_NAME)
    except metadata.PackageNotFoundError:
        return None


def _has_our_files(distribution: metadata.Distribution) -> bool:
    return any(file.parts[0] == PACKAGE_DIR.name for file in distribution.files or ())


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
