"""A program that waits until a model repository and its engines are complete.

An init container runs it before a server starts. A Helm release can build its engines itself, which
takes hours; a server that starts meanwhile would end at once, repeatedly.

    python3 -m llmops.model_repository.wait REPOSITORY
"""

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.errors import InputError, LlmopsError
from llmops.model_repository.repository.compatibility import check_engines
from llmops.model_repository.repository.manifest import RepositoryManifest
from llmops.model_repository.repository.validation import check_repository

#: Seconds between two checks of the repository. Short compared with the minutes that an engine
#: takes to load.
CHECK_INTERVAL = 5.0

#: Seconds after which an unchanged reason is printed again, so that an operator sees that the
#: program still waits.
REMINDER_INTERVAL = 60.0


def missing_reason(repository: Path) -> str | None:
    """Return the reason why the repository cannot be served yet, or None if it is complete."""
    try:
        check_repository(repository)
        manifest = RepositoryManifest.load(repository)
        check_engines(manifest)
        for name, engine in manifest.engines.items():
            engine_manifest = EngineManifest.load(Path(engine.directory))
            if not engine_manifest.complete:
                raise InputError(
                    f"The engine of {name} in {engine.directory} is still being built; wait for `llmops build` to end."
                )
            if engine_manifest.key != engine.key:
                raise InputError(
                    f"The engine of {name} in {engine.directory} is not the engine that the repository was "
                    "made from; run `llmops repo` again."
                )
    except (LlmopsError, OSError) as error:
        return str(error)
    return None


def wait_messages(repository: Path, interval: float = CHECK_INTERVAL) -> Iterator[str]:
    """Yield a message for each reason to wait, until the repository is complete.

    A message is yielded when the reason changes, and again each minute.
    """
    printed, printed_at = "", 0.0
    while reason := missing_reason(repository):
        now = time.monotonic()
        if reason != printed or now - printed_at >= REMINDER_INTERVAL:
            yield f"Waiting for {repository}: {reason}"
            printed, printed_at = reason, now
        time.sleep(interval)
    yield f"{repository} is complete."


def _end(_signal: int, _frame: object) -> None:
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    # set a handler, because the kernel ignores SIGTERM for a container's first process without one
    signal.signal(signal.SIGTERM, _end)
    for line in wait_messages(Path(sys.argv[1])):
        print(line, flush=True)
