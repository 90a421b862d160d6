"""What each part said last, under .cache/bench/results: a page can be put together from runs of single parts."""

from __future__ import annotations

from pathlib import Path

from llmops.perf.lab.harness.figures import Section
from llmops.perf.lab.suite.parts import Part

FOLDER = Path(".cache/bench/results")
# what a part gets: so much more than its own pace says it needs, at most so many times its limit
SLACK, MOST = 1.5, 5.0


def path(part: Part) -> Path:
    """Where `part` writes its section."""
    return FOLDER / f"{part.slug}.json"


def forget(part: Part) -> None:
    """A part that fails now must not show what it measured before."""
    for old in (path(part), _reason(part)):
        old.unlink(missing_ok=True)


def section(part: Part) -> Section | None:
    """What `part` measured last."""
    return Section.read_json(path(part)) if path(part).is_file() else None


def allowance(part: Part, seconds: float) -> float:
    """How long `part` may run when it was given `seconds`: what it needs at the pace of its first rounds."""
    found = section(part)
    if found is None or not found.done:
        return seconds
    return min(MOST * seconds, max(seconds, SLACK * found.seconds / found.done))


def set_missing(part: Part, why: str) -> None:
    """Note why `part` did not run."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    _reason(part).write_text(why)


def missing(part: Part) -> str | None:
    """Why `part` did not run, if it did not."""
    return _reason(part).read_text() if _reason(part).is_file() else None


def _reason(part: Part) -> Path:
    return FOLDER / f"{part.slug}.missing"
