"""The access log: one line of JSON per request, without prompts, texts and secrets."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from llmops.background_output import LineFile
from llmops.errors import ResourceError
from llmops.gateway.telemetry.request_timeline import FinishedRequest
from llmops.output_files import check_not_put_by_another

_STDOUT = 1


def format_line(one: FinishedRequest) -> str:
    """Return a request's line of the access log, which is JSON in printable ASCII.

    JSON escapes all other characters that clients sent, so that they cannot forge lines.
    """
    usage, meter, trace = one.outcome.usage, one.meter, one.trace
    facts = {
        "time": datetime.fromtimestamp(one.at, UTC).isoformat(timespec="milliseconds"),
        "request_id": one.request_id,
        "trace_id": trace.trace_id or None if trace is not None else None,
        "route": one.route or None,
        "status": one.outcome.status,
        "outcome": meter.outcome if meter is not None else None,
        "finish": one.outcome.finish or None,
        "model": one.model or None,
        "tenant": one.caller.tenant_id or None,
        "key": one.caller.key_id or None,
        "prompt_tokens": usage.prompt_tokens if usage is not None else None,
        "cached_tokens": usage.cached_tokens if usage is not None else None,
        "completion_tokens": usage.completion_tokens if usage is not None else None,
        "ttft_ms": _milliseconds(meter.ttft) if meter is not None else None,
        "tpot_ms": _milliseconds(meter.tpot) if meter is not None else None,
        "duration_ms": _milliseconds(one.ended - one.started),
        "replica": one.replica or None,
        "continued": one.continued or None,
    }
    return json.dumps(facts, separators=(",", ":")) + "\n"


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


class AccessLogFile(LineFile):
    """A file to which several processes append whole lines.

    If the file was moved away (log rotation), it is created again.
    """

    def __init__(self, place: str) -> None:
        """Open the file.

        Args:
            place: Path of the file; `-` is the standard output.

        Raises:
            ResourceError: The file cannot be written.
        """
        self._path = None if place == "-" else Path(place)
        try:
            super().__init__(self._open())
        except OSError as error:
            reason = "it is a pipe without a reader" if error.errno == errno.ENXIO else error.strerror or error
            raise ResourceError(
                f"The access log {place} cannot be written ({reason}); name another file with the "
                "setting access_log, or - for the standard output."
            ) from error

    def write(self, batch: Sequence[FinishedRequest]) -> None:
        """Append a line for each request. Raises OSError if the file cannot be written."""
        self._follow()
        self.write_lines(map(str.encode, map(format_line, batch)))

    def close(self) -> None:
        if self.descriptor != _STDOUT:
            os.close(self.descriptor)

    def _open(self) -> int:
        if self._path is None:
            return _STDOUT
        check_not_put_by_another(self._path)
        # without O_NONBLOCK, opening a pipe that no process reads would block all requests
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o640)
        os.set_blocking(file, True)
        check_not_put_by_another(self._path)  # the file may be newer than the first check
        return file

    def _follow(self) -> None:
        if self._path is not None and not (
            self._path.exists() and os.path.samestat(self._path.stat(), os.fstat(self.descriptor))
        ):
            new = self._open()
            self.close()
            self.descriptor = new
