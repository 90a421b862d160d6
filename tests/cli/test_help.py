"""Help, suggestions, `llmops clean`, and what a terminal or a platform changes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
from click.testing import CliRunner

from llmops.cli.main import COMMANDS, SECTIONS, cli
from tests.support.forked_cli import run


def every_command(group: click.Group = cli, above: str = "llmops") -> list[tuple[str, click.Command]]:
    found = []
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        found.append((f"{above} {name}", command))
        if isinstance(command, click.Group):
            found += every_command(command, f"{above} {name}")
    return found


def test_commands_stand_under_headings():
    text = CliRunner().invoke(cli, ["--help"]).output
    places = [text.index(f"\n{heading}:\n") for heading in SECTIONS]
    assert places == sorted(places)
    assert all(f"  {name} " in text for name in COMMANDS)


def test_help_is_written_in_sentences():
    for name, command in every_command():
        context = click.Context(command, info_name=name)
        assert command.help, name
        first = command.help.partition("\n")[0]
        assert first[0].isupper(), name
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                said = (parameter.help or "").partition("  [default")[0]
                assert said[:1].isalnum() or said[:1] in "'$`-", f"{name} {parameter.opts}: {said}"
                assert said.endswith((".", "]")), f"{name} {parameter.opts}: {said}"
        assert len(command.get_help(context).splitlines()) < 110, name


def test_no_color_removes_all_styling():
    script = "from llmops.cli.output import console; console(force_terminal=True).print('x', style='bold red')"
    plain, coloured = (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                       env={**os.environ, "TERM": "xterm", **more}).stdout
        for more in ({"NO_COLOR": "1"}, {"NO_COLOR": ""})
    )  # fmt: skip
    assert plain == "x\n"
    assert "\x1b[" in coloured


def test_completion_is_written_for_a_shell():
    script = "import sys; sys.argv = ['llmops']; from llmops.cli.main import main; main()"
    environment = {**os.environ, "_LLMOPS_COMPLETE": "bash_source"}
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert "_LLMOPS_COMPLETE" in found.stdout, found.stderr


def test_clean_shows_what_is_there_and_removes_what_is_asked_for(tmp_path: Path):
    (tmp_path / "up" / "engine").mkdir(parents=True)
    (tmp_path / "up" / "engine" / "weights").write_bytes(b"x" * 100_000)
    (tmp_path / "store.db").write_bytes(b"x" * 10_000)
    environment = {**os.environ, "LLMOPS_CACHE": str(tmp_path)}
    shown = json.loads(run("clean", "--json", env=environment).stdout)
    sizes = {part["name"]: part["bytes"] for part in shown["parts"]}
    assert sizes["engines"] >= 100_000
    assert sizes["store"] >= 10_000
    assert sizes["usage"] == 0

    kept = run("clean", "all", text="n\n", env=environment)
    assert "Remove " in kept.stderr
    assert (tmp_path / "up").exists()
    removed = run("clean", "all", "--yes", env=environment)
    assert removed.returncode == 0
    assert not (tmp_path / "up").exists()
    assert (tmp_path / "store.db").exists()
    for name in ("store.db-wal", "store.db.bak", "store.db-2026"):  # the last two are an operator's backups
        (tmp_path / name).write_text("x")
    assert run("clean", "store", "--yes", env=environment).returncode == 0
    assert sorted(path.name for path in tmp_path.glob("store*")) == ["store.db-2026", "store.db.bak"]
    assert run("clean", "everything", env=environment).stderr == (
        "Error: There is no part `everything`; choose from engines, backends, hashes, usage, store, or all.\n"
    )
