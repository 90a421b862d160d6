"""The `llmops` group: subcommands are imported only when they are called, so that `--help` stays fast."""

from __future__ import annotations

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

# name -> the one line that `llmops --help` shows; the command itself is `command` in llmops.cli.<name>
COMMANDS = {
    "init": "Start an llmops.yaml: one file for everything that follows.",
    "plan": "Whether a model fits, how to shard it, how fast it is and what it costs.",
    "recipe": "Ready plans for well-known models, each number with its source.",
    "simulate": "How a fleet would perform, with the gateway's own policies.",
    "build": "From a checkpoint to an engine folder.",
    "upgrade": "Move an engine to another release of TensorRT-LLM.",
    "repo": "From engine folders to a Triton model repository.",
    "serve": "Run Triton on a model repository.",
    "gateway": "OpenAI API in front of Triton: requests to gRPC streams.",
    "replicas": "What each gateway knows of its replicas.",
    "top": "Gateways, models and replicas, live.",
    "up": "Build, repository, Triton and gateway in one command.",
    "diff": "What an llmops.yaml would change.",
    "chart": "Values for the Helm chart from an llmops.yaml.",
    "tenant": "Who pays: tenants and their limits.",
    "key": "Who has access: API keys, their limits and budgets.",
    "price": "What tokens cost, and from when.",
    "usage": "What was used, and what it cost.",
    "control": "Administration, usage and the ledger, beside the gateways.",
    "audit": "Who changed what, and who was refused.",
    "verify": "Whether a deployment does what its contract, checkpoint and plan promise.",
    "chat": "Chat in the terminal with any OpenAI endpoint.",
    "bench": "Load-test an OpenAI endpoint or Triton itself.",
    "eval": "How much quality quantisation cost.",
    "doctor": "What this machine lacks, and how to fix it.",
}


class LazyGroup(click.Group):
    """Lists `COMMANDS` and imports a command's module on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"llmops.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="llmops")
def cli() -> None:
    """Checkpoint to OpenAI endpoint on NVIDIA Triton + TensorRT-LLM."""


_NO_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _Interrupts:
    """Ctrl-C as Python does it, and that there was one: a library that is just being imported turns it into an
    ImportError of its own."""

    def __init__(self) -> None:
        self.seen = False
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.seen = True
        signal.default_int_handler(signum, frame)


def main() -> NoReturn:
    """Run the CLI. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    interrupts = _Interrupts()
    _warn_of_foreign_files()
    try:
        code = cli.main(standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except LlmopsError as error:
        click.echo(f"Error: {error.message}", err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _interrupted()
    except ImportError:
        if not interrupts.seen:
            raise
        _interrupted()
    except OSError as error:
        if error.filename is not None or error.errno not in _NO_OUTPUT:
            raise
        _unwritable(error)
    sys.exit(code if isinstance(code, int) else 0)


def _warn_of_foreign_files() -> None:
    """Warn when PyPI's distribution `llmops`, which is not ours, has installed files into our package."""
    # a glob costs a millisecond, the import behind it ten times as much
    if any(Path(llmops.__file__).parents[1].glob("llmops-[0-9]*.dist-info")):
        from llmops.distribution import foreign_distributions, repair_command

        foreign = foreign_distributions(["llmops"])
        if foreign:
            click.echo(
                f"Warning: {', '.join(foreign)} has installed files into this package and is not part of it. "
                f"Repair with: {repair_command(foreign)}",
                err=True,
            )


def _interrupted() -> NoReturn:
    click.echo("Interrupted.", err=True)
    sys.exit(130)


def _unwritable(error: OSError) -> NoReturn:
    """Standard output is on a full disk, or a pipe whose reader has gone, which is that reader's own business."""
    # Python would try once more when it ends, and complain
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno != errno.EPIPE:
        click.echo(f"Error: the output cannot be written ({error.strerror}).", err=True)
    sys.exit(1)
