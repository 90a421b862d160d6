"""The base exceptions of the project.

Each message is one sentence that says what is wrong and how to fix it. The CLI prints the message
and exits with `exit_code`. The gateway's exceptions (`llmops.gateway.errors`) derive from these and
add an HTTP status. Any other exception is a bug, and its traceback is printed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


_DOUBLED_STOP = re.compile(r"(?<=[\w)`'\"])\.\.(?=\s|$)")


class LlmopsError(Exception):
    """The base of all errors that a user can fix. `exit_code` is the exit code of the CLI."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        # A message that ends with another error's sentence would have two full stops.
        message = _DOUBLED_STOP.sub(".", message.removeprefix("Error: "))
        super().__init__(message)
        self.message = message


class InputError(LlmopsError):
    """An option, file or combination of options that cannot be used."""

    exit_code = 2


class UnknownResourceError(InputError):
    """A named resource that does not exist."""


class DuplicateNameError(InputError):
    """A resource with a name that is already in use."""


class CheckpointError(InputError):
    """A checkpoint that is incomplete, damaged or of an unsupported architecture."""


class BuildError(LlmopsError):
    """A failed build. The build has removed its incomplete output."""


class ResourceError(LlmopsError):
    """A lack of disk, memory, ports or GPUs."""


class MissingDependencyError(LlmopsError):
    """A library or program that is not installed. The message names the extra that installs it."""


class VersionMismatchError(InputError):
    """An engine, image or library of another version."""


class ServerError(LlmopsError):
    """A Triton or gateway that could not start, or ended unexpectedly."""


def first_validation_error(error: ValidationError, whole: str = "") -> str:
    """Return the path of the first invalid value, and the reason, from a pydantic error.

    Args:
        error: The error of pydantic.
        whole: The name of the whole input, used if the invalid value is the input itself.
    """
    from llmops.validation_errors import explain_first_error

    place, clause = explain_first_error(error.errors())
    return f"{place or whole}: {clause}"
