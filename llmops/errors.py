"""One exception tree: each error is one sentence that says what was wrong and how to fix it.

The CLI prints the sentence and leaves with `exit_code`; the gateway's branch (`llmops.gateway.errors`)
adds the HTTP side. Anything that is not an `LlmopsError` is a bug and keeps its traceback.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


_DOUBLED_STOP = re.compile(r"(?<=[\w)`'\"])\.\.(?=\s|$)")


class LlmopsError(Exception):
    """Base of all errors that a user can put right. `exit_code` is the CLI's."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        # a sentence around another error's sentence ends twice
        message = _DOUBLED_STOP.sub(".", message.removeprefix("Error: "))
        super().__init__(message)
        self.message = message


class InputError(LlmopsError):
    """What the user gave cannot be used: a flag, a file, a combination of both."""

    exit_code = 2


class UnknownResourceError(InputError):
    """What was named is not there."""


class DuplicateNameError(InputError):
    """What was to be made is there already."""


class CheckpointError(InputError):
    """The checkpoint is missing something, damaged, or of an architecture that is not supported."""


class BuildError(LlmopsError):
    """A build could not be finished; nothing half written is left."""


class ResourceError(LlmopsError):
    """Not enough disk, memory, ports or GPUs for what was asked."""


class MissingDependencyError(LlmopsError):
    """A library or program that this command needs is not installed; the message names the extra."""


class VersionMismatchError(InputError):
    """An engine, image or library was made by or for another version."""


class ServerError(LlmopsError):
    """Triton or the gateway could not be started, or ended before it should."""


def first_validation_error(error: ValidationError, whole: str = "") -> str:
    """Return the first value that does not fit its model, and why; `whole` names what has no place inside."""
    from llmops.validation_errors import explain_first_error

    place, clause = explain_first_error(error.errors())
    return f"{place or whole}: {clause}"
