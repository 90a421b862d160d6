"""The JSON document of a run, with its options, machine, figures, and the record of every request."""

import json
import os
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from llmops import __version__
from llmops.errors import InputError, first_validation_error
from llmops.input_files import MAX_LIST_BYTES, read_json
from llmops.output_files import write_text
from llmops.perf.load.objectives import missed_objectives, parse_objective
from llmops.perf.load.sweep import SweepStep
from llmops.perf.report.summary import Summary
from llmops.untrusted_text import escape_unsafe

FORMAT = "llmops-bench/1"
_FIELDS = ("options", "machine", "summary", "sweep", "records", "origin", "created")


@dataclass
class Document:
    """All data that a report needs.

    Attributes:
        options: The options of the run, without secrets.
        machine: The description of the load generator's machine.
        summary: The figures of the run.
        sweep: The result of each rate that a sweep tried.
        records: The results of `Record.to_json`, with times relative to the start of the run.
        origin: The load generator's monotonic clock at the start, which only its process can use.
        created: The UTC time of the document.
    """

    options: dict[str, Any]
    machine: dict[str, Any]
    summary: Summary
    sweep: list[SweepStep] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    origin: float = 0.0
    created: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))

    def missed_objectives(self) -> str:
        """Return a sentence if too few requests met the objectives, otherwise an empty text."""
        slos, wanted = self.options.get("slos"), self.options.get("slo_share", 0.0)
        if not slos:
            return ""
        if self.options.get("sweep"):
            return "" if any(step.holds for step in self.sweep) else f"None of the tried rates meets {', '.join(slos)}."
        missed = missed_objectives(self.summary.attained, [parse_objective(slo) for slo in slos], wanted)
        return f"{', '.join(missed)}; lower the load, loosen an objective or speed up the server." if missed else ""

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "llmops": __version__, **asdict(self)}

    def write(self, path: Path) -> None:
        """Write the document to `path` as JSON. Raise InputError if the file cannot be written."""
        write_text(path, json.dumps(self.to_json()))


def read_document(path: Path) -> Document:
    """Read a document from `path`. Raise InputError if the file is not a valid report."""
    try:
        data = read_json(path, MAX_LIST_BYTES)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); name a file that `llmops bench --json FILE` wrote."
        ) from error
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}); name a file that `llmops bench --json FILE` wrote.") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InputError(f"{path} is not a report of `llmops bench --json` ({FORMAT}); name a file that is.")
    try:
        shown = {name: _shown(data[name]) for name in _FIELDS if name not in ("records", "origin")}
        return TypeAdapter(Document).validate_python({**shown, "records": data["records"], "origin": data["origin"]})
    except (ValidationError, KeyError) as error:
        problem = first_validation_error(error) if isinstance(error, ValidationError) else f"it has no {error}"
        raise InputError(f"{path} is a damaged report ({problem}); name a report that was not edited.") from error


def _shown(value: Any) -> Any:
    """Return a value of a report with its texts escaped for printing.

    The report may be untrusted.
    """
    if isinstance(value, str):
        return escape_unsafe(value)
    if isinstance(value, dict):
        return {escape_unsafe(str(name)): _shown(one) for name, one in value.items()}
    return [_shown(one) for one in value] if isinstance(value, list) else value


def machine() -> dict[str, Any]:
    """Return a description of the load generator's machine."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
