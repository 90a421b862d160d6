"""Compute SHA-256 digests of large files, cached by path, size, inode and times of change."""

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path

from llmops.cache import cache_dir


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, as hex digits."""
    real = path.resolve()
    stamp, record = _stamp(real), _record_of(real)
    known = _read(record)
    if known is not None and known.get("stamp") == stamp:
        return str(known["sha256"])
    with real.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # The digest of a file that changed during the reading must not be cached under the new time.
    if _stamp(real) == stamp:
        _write(record, {"stamp": stamp, "sha256": digest})
    return digest


def remember_linked(path: Path, digest: str) -> None:
    """Cache the known SHA-256 of a file again after a link to it was made, which changed its inode's time."""
    real = path.resolve()
    _write(_record_of(real), {"stamp": _stamp(real), "sha256": digest})


def digest_if_file(name: str) -> str | None:
    """Return the SHA-256 of the file `name`, as hex digits, or None if the file does not exist."""
    path = Path(name).expanduser()
    return sha256_of(path) if path.is_file() else None


def _record_of(path: Path) -> Path:
    return cache_dir() / "sha256" / hashlib.sha256(str(path).encode()).hexdigest()[:32]


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _read(record: Path) -> dict | None:
    try:
        if record.lstat().st_uid not in (os.getuid(), 0):
            return None  # another user's, in a shared LLMOPS_CACHE
        known = json.loads(record.read_text())
    except (OSError, ValueError):
        return None
    return known if isinstance(known, dict) else None


def _write(record: Path, content: dict) -> None:
    # The cache only saves time, so a read-only home directory must not fail a build.
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=record.parent, delete=False) as file:
            json.dump(content, file)
        os.replace(file.name, record)
