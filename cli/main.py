"""The `llmops` command group.

A subcommand's module is imported only when the subcommand is called, so that `--help` stays fast.
"""

import difflib
import errno
import importlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

import llmops
from llmops import __version__
from llmops.errors import LlmopsError
from llmops.untrusted_text import escape_unsafe

# Heading → name of a command → the command's line in `llmops --help`. The command is the object
# `command` in the module llmops.cli.<name>.
SECTIONS = {
    "Plan": {
        "init": "Write an llmops.yaml: one file for all commands below.",
        "plan": "Plan a deployment: memory, layout, speed and cost.",
        "recipe": "Show ready plans for well-known models, each number with its source.",
        "simulate": "Simulate a fleet with the gateway's own policies.",
    },
    "Build": {
        "build": "Build an engine folder from a checkpoint.",
        "upgrade": "Rebuild an engine for another release of TensorRT-LLM.",
        "eval": "Measure how much quality quantisation cost.",
        "repo": "Make a Triton model repository from engine folders.",
    },
    "Serve": {
        "up": "Build, serve and open an OpenAI endpoint in one command.",
        "serve": "Run Triton on a model repository.",
        "gateway": "Run the OpenAI API in front of Triton.",
        "diff": "Show what an llmops.yaml would change.",
        "chart": "Write the Helm chart's values from an llmops.yaml.",
        "rollout": "Move a model to another version, step by step.",
    },
    "Watch": {
        "chat": "Chat in the terminal with any OpenAI endpoint.",
        "verify": "Check that a deployment does what it promised.",
        "bench": "Load-test an OpenAI endpoint or Triton itself.",
        "prefix": "Explain why prompts miss the prefix cache.",
        "top": "Watch gateways, models and replicas live.",
    },
    "Models": {
        "safety": "Test and train the filters of prompts and answers.",
        "router": "Train the choice of a model by an alias.",
    },
    "Accounts": {
        "tenant": "Manage tenants: who pays, and their limits.",
        "key": "Manage API keys, their limits and budgets.",
        "price": "Manage what tokens cost, and from when.",
        "usage": "Show what was used, and what it cost.",
        "audit": "Show who changed what, and who was refused.",
        "control": "Serve administration, usage and the ledger.",
    },
    "This machine": {
        "doctor": "Check what this machine lacks, and how to fix it.",
        "clean": "Show what caches and the store take, and remove it.",
    },
}
COMMANDS = {name: line for commands in SECTIONS.values() for name, line in commands.items()}


class LazyGroup(click.Group):
    """The group of the commands in SECTIONS, which imports a command's module on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        _escape_warnings()
        module = importlib.import_module(f"llmops.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            meant = f"did you mean `llmops {near[0]}`?" if near else "`llmops --help` lists the commands."
            ctx.fail(f"There is no command `{args[0]}`; {meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, commands in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl(list(commands.items()), col_max=10)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.version_option(__version__, prog_name="llmops")
def cli() -> None:
    """Take a checkpoint to an OpenAI endpoint on NVIDIA Triton + TensorRT-LLM.

    `llmops up` starts one on this machine with a bundled model. `llmops COMMAND --help` explains a
    command.
    """


def _escape_warnings() -> None:
    """Escape the warnings that a command prints, because they may contain texts of servers."""
    # imported here, because `llmops --help` needs no logging
    import logging

    from llmops.gateway.logging_setup import SafeFormatter

    if logging.lastResort is not None:
        logging.lastResort.setFormatter(SafeFormatter("%(message)s"))


#: Maximum number of characters of an error message, which may contain the text of a server or file.
MAX_ERROR_LENGTH = 4096
# errors that the operating system raises for an unusable path from the command line
_UNUSABLE_PATH = (errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG)
_NO_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _Interrupts:
    """A handler of SIGINT that behaves like Python's and remembers the signal.

    The memory is needed because some libraries turn a KeyboardInterrupt during their import into an
    ImportError.
    """

    def __init__(self) -> None:
        self.seen = False
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.seen = True
        signal.default_int_handler(signum, frame)


def main() -> NoReturn:
    """Run the CLI. Exit codes: 0 success, 1 failure, 2 invalid input, 130 interrupted."""
    if sys.platform != "linux":
        sys.exit(f"Error: llmops runs on Linux, but this is {sys.platform}; use a Linux machine, a container or WSL 2.")
    interrupts = _Interrupts()
    # caches and repositories contain code, so no umask may let every user write to them
    os.umask(os.umask(0o077) | 0o002)
    _warn_of_foreign_files()
    try:
        code = cli.main(prog_name="llmops", standalone_mode=False, color=False if os.environ.get("NO_COLOR") else None)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        from llmops.cli.click_errors import error_message

        _print_error(error_message(error))
        sys.exit(error.exit_code)
    except LlmopsError as error:
        _print_error(error.message)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _interrupted()
    except ImportError:
        if not interrupts.seen:
            raise
        _interrupted()
    except OSError as error:
        if error.errno in _UNUSABLE_PATH and error.filename is not None:
            path = escape_unsafe(os.fsdecode(error.filename))
            click.echo(f"Error: {path} cannot be used ({error.strerror}); choose another path.", err=True)
            sys.exit(2)
        if error.filename is not None or error.errno not in _NO_OUTPUT:
            raise
        _unwritable(error)
    sys.exit(code if isinstance(code, int) else 0)


def _warn_of_foreign_files() -> None:
    """Warn if PyPI's unrelated distribution `llmops` has installed files into this package."""
    # look first with a glob, which takes a millisecond; the import below takes ten
    if any(Path(llmops.__file__).parents[1].glob("llmops-[0-9]*.dist-info")):
        from llmops.distribution import foreign_distributions, repair_command

        foreign = foreign_distributions(["llmops"])
        if foreign:
            click.echo(
                f"Warning: {', '.join(foreign)} has installed files into this package and is not part of it. "
                f"Repair with: {repair_command(foreign)}",
                err=True,
            )


def _print_error(message: str) -> None:
    """Print an error on one line, so that no untrusted text in it can begin a line."""
    text = escape_unsafe(message, MAX_ERROR_LENGTH, lines=True).replace("\n", "\n  ")
    click.echo(f"Error: {text}", err=True)


def _interrupted() -> NoReturn:
    click.echo("Interrupted.", err=True)
    sys.exit(130)


def _unwritable(error: OSError) -> NoReturn:
    """Handle a failed write to standard output: a full disk, or a closed pipe.

    A closed pipe is not an error, because its reader needs no more output.
    """
    # replace standard output, because Python would write again at exit and print an error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno != errno.EPIPE:
        click.echo(
            f"Error: Standard output cannot be written ({error.strerror}); free disk space, or redirect the output.",
            err=True,
        )
    sys.exit(1)
