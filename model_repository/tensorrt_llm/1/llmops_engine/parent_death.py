"""An engine ends with its server, however that ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time

# seconds in which a stub ends by itself when its server is gone
PARENT_DEATH_GRACE = 10.0


def exit_with_parent(grace: float = PARENT_DEATH_GRACE) -> None:
    """SIGKILL to this process, `grace` seconds after its parent has ended.

    A stub that waits for an answer of its server's, of a metric say, waits for good when that was killed, and keeps the
    engine's memory. PR_SET_PDEATHSIG would not do: the thread of the server that starts a stub ends at once.
    """
    # Linux before 5.3 has none
    with contextlib.suppress(OSError):
        parent = os.pidfd_open(os.getppid())
        threading.Thread(target=_watch, args=(parent, grace), name="orphan", daemon=True).start()


def _watch(parent: int, grace: float) -> None:
    ended = select.poll()
    ended.register(parent, select.POLLIN)
    ended.poll()
    time.sleep(grace)
    os.kill(os.getpid(), signal.SIGKILL)
