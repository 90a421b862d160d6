"""`llmops clean`: show and remove this machine's caches."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from llmops.cli.output import print_line
from llmops.errors import InputError, ResourceError

# Name of a part → the part's files in the cache folder, and a description. `all` never removes the
# store or usage that the store does not have yet.
PARTS = {
    "engines": ("up", "engines and repositories that `llmops up` built; they are built again when needed"),
    "backends": ("triton-backends", "Triton's backends, laid out for this Python; laid out again when needed"),
    "hashes": ("sha256", "hashes of checkpoints; computed again when needed"),
    "usage": ("usage", "usage that the store does not have yet: once removed, it is never billed"),
    "store": ("store.db*", "keys, tenants, prices and usage of the default store: they cannot be recovered"),
}
#: Ends of the names of the store's files. Files with other ends, such as backups, stay.
_STORE_ENDS = ("", "-wal", "-shm", "-journal", ".lead", ".ledger")
REBUILT = ("engines", "backends", "hashes")


@dataclass(frozen=True)
class CachePart:
    """A group of cached files of one kind, with their size in bytes.

    `holds` is the description of the files for the user.
    """

    name: str
    path: str
    bytes: int
    holds: str


@click.command("clean")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--yes", is_flag=True, help="Remove without asking.")
@click.option("--json", "as_json", is_flag=True, help="Print the parts and their sizes as JSON.")
def command(names: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Show what the cache folder holds, with sizes, and remove the parts with these NAMEs.

    NAME is engines, backends, hashes, usage or store; `all` stands for the first three, which are
    made again when they are needed. Stop `llmops up`, `gateway` and `control` before you remove
    what they use. Checkpoints of the Hugging Face hub are its own cache: `hf cache` shows and
    removes them.
    """
    from llmops.cache import cache_dir

    folder = cache_dir()
    expected = [one for name in names for one in (REBUILT if name == "all" else (name,))]
    for name in expected:
        if name not in PARTS:
            raise InputError(f"There is no part `{name}`; choose from {', '.join(PARTS)}, or all.")
    found = [_part(folder, name) for name in PARTS]
    if as_json:
        click.echo(json.dumps({"folder": str(folder), "parts": [asdict(part) for part in found]}, indent=2))
    elif not expected:
        print_line(str(folder))
        click.echo()
        for part in found:
            click.echo(f"{part.name:10}{_size(part.bytes):>10}  {part.holds}")
        click.echo("\nRemove some with `llmops clean NAME...`.")
    for part in found:
        if part.name in expected and part.bytes:
            _remove(folder, part, yes, as_json)


def _files(folder: Path, name: str) -> list[Path]:
    ours = {f"store.db{end}" for end in _STORE_ENDS}
    return sorted(path for path in folder.glob(PARTS[name][0]) if name != "store" or path.name in ours)


def _part(folder: Path, name: str) -> CachePart:
    pattern, holds = PARTS[name]
    return CachePart(name, str(folder / pattern), sum(map(_bytes, _files(folder, name))), holds)


def _bytes(path: Path) -> int:
    """Return the bytes of a file or folder. A file that is removed meanwhile counts as 0."""

    def each() -> Iterator[int]:
        for place, _, names in os.walk(path):
            for name in names:
                try:
                    yield os.lstat(os.path.join(place, name)).st_blocks * 512
                except OSError:
                    continue

    return path.lstat().st_blocks * 512 if path.is_file() else sum(each())


def _remove(folder: Path, part: CachePart, yes: bool, quiet: bool) -> None:
    if not yes and not _confirmed(f"Remove {part.path} ({_size(part.bytes)}: {part.holds})?"):
        return
    try:
        for path in _files(folder, part.name):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    except OSError as error:
        raise ResourceError(
            f"{error.filename or part.path} cannot be removed ({error.strerror}); run `llmops clean` as its owner."
        ) from error
    if not quiet:
        print_line(f"Removed {part.path} ({_size(part.bytes)}).")


def _confirmed(question: str) -> bool:
    """Ask a yes-or-no question and return the answer.

    Raises InputError if standard input ends before an answer.
    """
    try:
        return click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        click.echo(err=True)
        raise InputError(
            "Nothing more was removed, because standard input has no answer; give --yes to remove without asking."
        ) from None


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
