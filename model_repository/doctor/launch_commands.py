"""The command lines of `llmops serve`, parsed by the tritonserver that would run them."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from llmops.contract import ENGINE_SUFFIX
from llmops.model_repository.multi_gpu.launch_plan import LaunchPlan, launch_command
from llmops.model_repository.server.command import LaunchOptions
from llmops.model_repository.server.installation import Installation

#: Maximum seconds in which tritonserver must load its libraries and print its usage.
_TIMEOUT = 60
_ENGINE = f"doctor{ENGINE_SUFFIX}"
#: An example plan for each mode in which a repository can be launched.
PLANS = (
    LaunchPlan("single", 1, [], 0),
    LaunchPlan("leader", 2, [_ENGINE], 2),
    LaunchPlan("orchestrator", 1, [_ENGINE], 2),
)


def parse_launch_commands(installation: Installation, plan: LaunchPlan) -> int:
    """Let tritonserver parse each command of a plan, with every option of `llmops serve`.

    `--help` ends each command, so that no server starts. Triton parses from left to right and
    always prints its usage; any other output is a complaint.

    Returns:
        The number of options that Triton accepted.

    Raises:
        ValueError: Triton rejected an option, or did not start.
    """
    options = LaunchOptions(http=True, traces="http://127.0.0.1:4318/v1/traces")
    server = replace(installation.server_options(Path("repository"), options), http_host=options.host)
    command, environment = launch_command(server, plan)
    environment = {**os.environ, **installation.environment, **environment}
    usage = _output([server.binary], environment)
    if "--model-repository" not in usage:
        raise ValueError(f"{server.binary} does not print its usage: {usage.strip()[-300:]}")
    accepted = 0
    for arguments in _servers(command, server.binary):
        output = _output([server.binary, *arguments], environment)
        if output != usage:
            complaint = " ".join(line for line in output.splitlines() if line not in usage.splitlines())
            raise ValueError(f"tritonserver rejects the command line of `llmops serve`: {complaint.strip()}")
        accepted += len(arguments)
    return accepted


def _servers(command: list[str], binary: str) -> Iterator[list[str]]:
    """Yield the arguments of each tritonserver. A colon separates the programs of mpirun."""
    starts = [at for at, word in enumerate(command) if word == binary]
    for at in starts:
        end = command.index(":", at) if ":" in command[at:] else len(command)
        yield command[at + 1 : end]


def _output(command: list[str], environment: dict[str, str]) -> str:
    try:
        run = subprocess.run(
            [*command, "--help"], env=environment, capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(str(error)) from error
    return run.stdout + run.stderr
