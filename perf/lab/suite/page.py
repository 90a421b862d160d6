"""docs/performance.md out of what the parts measured."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import re

from llmops.perf.lab.harness.figures import Section, missed_line
from llmops.perf.lab.suite import results
from llmops.perf.lab.suite.parts import Part
from llmops.perf.report.document import machine

PACKAGES = ("openvino", "openvino-genai", "nvidia-pytriton", "grpcio", "uvicorn", "fastapi", "uvloop", "tokenizers")
COLUMNS = ("section", "figure", "value", "unit", "aim", "measured")
INTRODUCTION = """\
# Performance

Written by `make bench`; every figure below was measured by the command above it, none was typed in. A part by itself:
`python -m llmops.perf.lab.suite --only "hot path"`. CPU figures are what the processes themselves used; where other
processes took much of the machine meanwhile, the part says so. A part that has aims shows the figures that have one;
all figures are in [performance.csv](performance.csv).
"""


def page(parts: list[Part], earlier: str = "") -> str:
    """The Markdown page. A part that did not run here is told as in `earlier`, the page before."""
    known = {part.name: results.section(part) for part in parts}
    why = {part.name: results.missing(part) for part in parts}
    before = {name: text for name, text in _told(earlier).items() if not (known.get(name) or why.get(name))}
    ran = [section for section in known.values() if section is not None]
    lacks = {name: reason or "was not run" for name, reason in why.items() if not known[name] and name not in before}
    texts = {**before, **{name: section.markdown() for name, section in known.items() if section is not None}}
    return "\n".join([
        INTRODUCTION,
        *_circumstances(ran, sum(one.seconds for part in parts if part.included and (one := known[part.name]))),
        "",
        "## Not reached",
        "",
        *([*_misses(ran), *_misses_before(earlier, before)] or ["All aims of what ran were reached."]),
        *(f"- {name}: did not run ({reason})" for name, reason in lacks.items()),
        "",
        *(f"{_mark(part.name)}\n{texts[part.name]}" for part in parts if part.name in texts),
    ])  # fmt: skip


def table(parts: list[Part], earlier: str = "") -> str:
    """Return all figures as CSV. A part that did not run here has its rows of `earlier`, the table before."""
    measured = [row for part in parts if (section := results.section(part)) for row in section.rows()]
    titles = {row[0] for row in measured}
    kept = [row for row in list(csv.reader(earlier.splitlines()))[1:] if row[0] not in titles]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *kept, *measured])
    return text.getvalue()


def _mark(name: str) -> str:
    return f"<!-- {name} -->"


def _told(earlier: str) -> dict[str, str]:
    """The sections of a page by their parts."""
    _, *pieces = re.split(_mark("(.+)") + r"\n", earlier)
    return {name: text.rstrip("\n") + "\n" for name, text in zip(pieces[::2], pieces[1::2], strict=True)}


def _misses_before(earlier: str, before: dict[str, str]) -> list[str]:
    titles = tuple(f"- {text.splitlines()[0].removeprefix('## ')}: " for text in before.values())
    return [line for line in earlier.splitlines() if line.startswith(titles)] if titles else []


def _circumstances(sections: list[Section], seconds: float) -> list[str]:
    host = machine()
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    days = sorted({section.when.split(" ")[0] for section in sections})
    return [
        f"- {' to '.join(dict.fromkeys((days or ['?'])[:: max(1, len(days) - 1)]))}, {host['memory_gib']} GiB, "
        f"{host['system']}, Python {host['python']}; {seconds / 60:.1f} minutes for the parts of a whole run",
        f"- {versions}",
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _misses(sections: list[Section]) -> list[str]:
    """Aims that were missed, and what a part says did not run."""
    lines = [f"- {missed_line(section, figure)}" for section in sections for figure in section.missed]
    return lines + [f"- {section.title}: {lack}" for section in sections for lack in section.lacks]
