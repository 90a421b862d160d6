"""docs/performance.md out of what the parts measured."""

from __future__ import annotations

import importlib.metadata

from llmops.perf.lab.harness.figures import Section, missed_line
from llmops.perf.lab.suite import results
from llmops.perf.lab.suite.parts import Part
from llmops.perf.report.document import machine

PACKAGES = ("openvino", "openvino-genai", "nvidia-pytriton", "grpcio", "uvicorn", "fastapi", "uvloop", "tokenizers")
INTRODUCTION = """\
# Performance

Written by `make bench`; every figure below was measured by the command above it, none was typed in. A part by itself:
`python -m llmops.perf.lab.suite --only "hot path"`. CPU figures are what the processes themselves used; where other
processes took much of the machine meanwhile, the part says so.
"""


def page(parts: list[Part]) -> str:
    """The Markdown page."""
    known = {part.name: results.section(part) for part in parts}
    sections = [section for section in known.values() if section is not None]
    missing = {part.name: results.missing(part) or "was not run" for part in parts if known[part.name] is None}
    return "\n".join([
        INTRODUCTION,
        *_circumstances(sections, sum(one.seconds for part in parts if part.included and (one := known[part.name]))),
        "",
        "## Not reached",
        "",
        *(_misses(sections) or ["All aims of what ran were reached."]),
        *(f"- {name}: did not run ({why})" for name, why in missing.items()),
        "",
        *(section.markdown() for section in sections),
    ])  # fmt: skip


def _circumstances(sections: list[Section], seconds: float) -> list[str]:
    host = machine()
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    days = sorted({section.when.split(" ")[0] for section in sections})
    return [
        f"- {' to '.join(dict.fromkeys((days or ['?'])[:: max(1, len(days) - 1)]))}, {host['cores']} cores of "
        f"{host['cpu']}, {host['memory_gib']} GiB, {host['system']}, Python {host['python']}; "
        f"{seconds / 60:.1f} minutes for the parts of a whole run",
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
