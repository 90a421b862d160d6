"""A folder for the time of one command that is gone afterwards, however the command ends."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

# waits until nobody holds the other end of its input, which the kernel closes even after `kill -9`
_REMOVER = 'cat > /dev/null; rm -rf -- "$1"'


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Removed by a process of its own when this one is gone: `finally` does not run after SIGKILL."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    # of its own session, so that neither Ctrl-C nor a signal to the process group reaches it
    remover = subprocess.Popen(
        ["/bin/sh", "-c", _REMOVER, "sh", str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield folder
    finally:
        assert remover.stdin is not None
        remover.stdin.close()
        remover.wait()
