"""docs/performance.md out of what the parts measured."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import re

from llmops.perf.lab.harness.figures import Section, place
from llmops.perf.lab.suite import results
from llmops.perf.lab.suite.parts import Part
from llmops.perf.report.document import machine

PACKAGES = ("openvino", "openvino-genai", "nvidia-pytriton", "grpcio", "uvicorn", "fastapi", "uvloop", "tokenizers")
COLUMNS = ("section", "figure", "value", "unit", "aim", "measured")
INTRODUCTION = """\
# Performance

Written by `make bench`. One row per benchmark: its first figure with an aim, every aim that was
missed, or up to three figures where a benchmark has no aims. [performance.csv](performance.csv) has
all figures. CPU is what the measured processes used. One benchmark alone:
`python -m llmops.perf.lab.suite --only "hot path"`.
"""
HEADER = "| | measured (aim) | command | when, where |\n|---|---|---|---|"
#: Figures of a benchmark without aims that the page shows: enough for two sides and their ratio.
COMPARED = 3


def page(parts: list[Part], earlier: str = "") -> str:
    """Return the Markdown page. A part that did not run here keeps its row of `earlier`, the page before."""
    known = {part.name: results.section(part) for part in parts}
    why = {part.name: results.missing(part) for part in parts}
    rows = {name: row for name, row in _rows(earlier).items() if not why.get(name)}
    rows |= {name: _row(name, section) for name, section in known.items() if section is not None}
    lacks = {name: reason or "was not run" for name, reason in why.items() if name not in rows}
    ran = [section for section in known.values() if section is not None]
    return "\n".join([
        INTRODUCTION,
        *_circumstances(ran, sum(one.seconds for part in parts if part.included and (one := known[part.name]))),
        "",
        HEADER,
        *(rows[part.name] for part in parts if part.name in rows),
        *(["", *(f"- {name}: did not run ({reason})" for name, reason in lacks.items())] if lacks else []),
        "",
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
    return f"| <!-- {name} -->"


def _rows(earlier: str) -> dict[str, str]:
    """Return the rows of a page by the names of their parts."""
    return {match[1]: match[0] for match in re.finditer(r"^\| <!-- (.+?) -->.*$", earlier, re.M)}


def _row(name: str, section: Section) -> str:
    aimed = [figure for figure in section.figures if figure.target is not None]
    shown = [figure for at, figure in enumerate(aimed) if at == 0 or not figure.reached]
    cells = [figure.text() for figure in shown or section.figures[:COMPARED]] + section.lacks
    when = section.circumstances(here=place())
    return f"{_mark(name)}{section.title} | {'<br>'.join(cells)} | `{section.command}` | {when} |"


def _circumstances(sections: list[Section], seconds: float) -> list[str]:
    host = machine()
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    days = sorted({section.when.split(" ")[0] for section in sections})
    return [
        f"- {' to '.join(dict.fromkeys((days or ['?'])[:: max(1, len(days) - 1)]))}, {place()}, "
        f"{host['memory_gib']} GiB, {host['system']}, Python {host['python']}; "
        f"{seconds / 60:.1f} minutes for the parts of a whole run",
        f"- {versions}",
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
