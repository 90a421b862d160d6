"""Every `llmops` command in docs, notes, comments, messages and help is one that our own CLI takes."""

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

import click
import pytest

from llmops.cli.main import COMMANDS, cli
from llmops.cli.options import OutputFile

ROOT = Path(__file__).parents[2]
# what a shell reads as the end of a command
ENDS = ("|", "||", "&&", ";", "&", ">", ">>", "2>", "#")
# values that a reader fills in
PLACEHOLDER = re.compile(r"[A-Z]{2,}|…|\.\.\.|[<>${}*|]|^[A-Z]$")
# quoted messages and prose, which begin with the name as well
QUOTED = ("cannot listen", "plans a deployment")


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).is_file()]


def in_text(text: str) -> Iterator[str]:
    """Yield the commands in a text: those between backticks, and lines of a shell."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for code in re.findall(r"`([^`\n]+)`", joined):
        yield from filter(_is_command, re.findall(r"(?:^|\s|&& )llmops (?=[a-z])(.*)", code))
    for line in joined.splitlines():
        shell = re.match(r"\s*(?:\$ |# {1,3})?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?llmops (?=[a-z-])(.*)", line)
        shell = shell or re.search(r" -- llmops (?=[a-z])(.*)", line)
        if shell and _is_command(shell[1]):
            yield shell[1]
        if (image := re.search(r"llmops:(?:trtllm|gateway)\S* (?=[a-z])(.*)", line)) and _is_command(image[1]):
            yield image[1]


def _is_command(text: str) -> bool:
    """Return True unless the words are prose or output, which begin with the name too."""
    return not text.startswith(QUOTED) and bool(get_close_matches(text.split()[0], COMMANDS, n=1, cutoff=0.7))


def written() -> Iterator[tuple[str, str]]:
    for path in tracked("*.md", "deploy/*.txt", "deploy/*.yaml", "deploy/*.tpl", "Makefile", "Dockerfile*"):
        if path.name == "CHANGELOG.md" or "decisions" in path.parts or path.name == "cli.md":
            continue
        for command in in_text(path.read_text()):
            yield str(path.relative_to(ROOT)), command
    for path in tracked("*.py", ":!tests", ":!perf/lab"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "llmops " in node.value:
                for code in re.findall(r"`llmops ([a-z][^`]*)`", node.value):
                    yield str(path.relative_to(ROOT)), code


def fault_in(text: str) -> str:
    """Return what is wrong with the arguments of `llmops`; an empty text for nothing."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        words = text.split()
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group):
        if not words or words[0].startswith("-") or words[0] in ENDS:
            break
        if PLACEHOLDER.search(words[0]) or words[0].startswith("["):
            return ""
        name = words.pop(0).rstrip(",.:;")
        found = command.get_command(context, name)
        if found is None:
            return "" if command is not cli and getattr(command, "invoke_without_command", False) else f"no {name!r}"
        command = found
    params = [one for one in command.get_params(context) if isinstance(one, click.Option)]
    options = {opt: one for one in params for opt in (*one.opts, *one.secondary_opts)}
    while words:
        word = words.pop(0)
        if word in ENDS:
            break
        if not re.match(r"--?[a-zA-Z]", word):
            continue
        name, equals, value = word.rstrip(",.;)]").partition("=")
        if name not in options and not name.startswith("--") and name[:2] in options:
            continue
        if name not in options:
            return f"no option {name}"
        option = options[name]
        if option.is_flag or not (equals or words):
            continue
        value = value if equals else words.pop(0)
        if PLACEHOLDER.search(value) or isinstance(option.type, (click.Path, OutputFile)) or option.nargs != 1:
            continue
        try:
            option.type.convert(value.rstrip(",.;)]"), option, click.Context(command))
        except click.UsageError as error:
            return f"{name} {value}: {error.message}"
    return ""


def test_every_written_command_is_one_that_our_cli_takes():
    found = list(written())
    assert len(found) > 250
    assert {path.partition("/")[0] for path, _ in found} >= {"README.md", "docs", "deploy", "cli", "build", "gateway"}
    faults = [f"{path}: llmops {text} ({fault})" for path, text in found if (fault := fault_in(text))]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("srve model_repository", "no 'srve'"),
        ("key create --tenant a --user b --scope admin", "no option --scope"),
        ("bench URL -d 60", "60 has no unit"),
        ("plan X --quant fp8 --target tensorflow", "is not one of"),
        ("key creat", "no 'creat'"),
        ("serve /models --host 0.0.0.0 | tee log --nothing", ""),
        ("up", ""),
    ],
)
def test_the_lint_finds_what_is_wrong(text, fault):
    assert fault in fault_in(text) if fault else not fault_in(text)
    assert set(COMMANDS) >= {"serve", "key", "bench"}
