"""The commands of README and docs, and bash scripts that run those of a page."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "clients").glob("*.md"))]
#: What a block may be marked with after `console`, and what its commands need then.
MARKS = {
    "gpu": "NVIDIA GPUs, or what only they can make",
    "cluster": "Kubernetes, or docker",
    "network": "a package registry, or a repository to clone",
}
_BLOCK = re.compile(r"^( *)```([^\n]*)\n(.*?)^ *```", re.S | re.M)
# a line that a reader would type, whether or not it is written as one
TYPED = re.compile(r"(llmops|docker|helm|kubectl|pip|make) \S")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its info string, its line, and its text."""

    page: Path
    line: int
    info: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[tuple[str, bool]]:
        """Return the commands, each with True if the page shows that it fails."""
        found: list[list[str]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append([line[2:]])
            elif found:
                found[-1].append(line)
        return [_command(lines) for lines in found]


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    text = page.read_text("utf-8")
    for match in _BLOCK.finditer(text):
        yield Block(page, text[: match.start()].count("\n") + 1, match[2].strip(), match[3])


def _command(lines: Sequence[str]) -> tuple[str, bool]:
    """Split a command from its output: it goes on after a backslash, and until its quotes are closed."""
    at = 1
    while at < len(lines) and (lines[at - 1].endswith("\\") or "\n".join(lines[:at]).count("'") % 2):
        at += 1
    return "\n".join(lines[:at]), any(line.startswith("Error:") for line in lines[at:])


def script_of(page: Path, changes: Mapping[str, str]) -> str:
    """Return a bash script with the commands of `page` that are not marked, after `changes` of their text."""
    lines = []
    for block in blocks_of(page):
        if block.info != "console":
            continue
        for command, fails in block.commands():
            for old, new in changes.items():
                command = re.sub(old, new, command)
            refused = f"if {command}\nthen echo 'it succeeded, the page shows an error'; exit 1; fi"
            lines += [f"echo {shlex.quote('$ ' + command)}", refused if fails else command]
    return "\n".join(lines)
