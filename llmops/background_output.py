"""Standard output and standard error that are written by a thread, so that no event loop waits.

A pipe whose reader stands still, a stopped terminal or a slow disk blocks whoever writes to it.
Docker's and Kubernetes' log drivers read such pipes.
"""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from queue import SimpleQueue
from typing import BinaryIO, TextIO, cast

#: Maximum number of bytes that wait for a slow reader. Bursts of a log of level debug fit.
MAX_WAITING_BYTES = 4 * 2**20
#: Maximum seconds for which a process waits for its last lines to be written when it exits.
EXIT_TIMEOUT = 2.0
#: Size in bytes up to which a write to a pipe is atomic, even with several writers (PIPE_BUF).
_MAX_ATOMIC_WRITE = 4096

#: The streams that were replaced: a stream that is not referenced any longer closes its file.
_replaced: list[TextIO] = []


class LineFile:
    """A file descriptor to which several processes write whole lines."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._torn = False

    def write_lines(self, lines: Iterable[bytes]) -> None:
        """Write lines in few calls. Raises OSError if the file cannot be written."""
        piece = b""
        for line in lines:
            if piece and len(piece) + len(line) > _MAX_ATOMIC_WRITE:
                self._write(piece)
                piece = b""
            piece += line
        self._write(piece)

    def _write(self, piece: bytes) -> None:
        """Write whole lines. Begin with a line break if a full disk cut off the last line."""
        left = b"\n" + piece if self._torn else piece
        while left:
            written = os.write(self.descriptor, left)
            left = left[written:]
            self._torn = bool(left)


class BackgroundFile(io.RawIOBase):
    """A file whose `write` never waits: a thread writes the lines.

    Lines beyond MAX_WAITING_BYTES are dropped and counted, as are lines that cannot be written. A
    line reports their number as soon as the file can be written again. Each process has its own
    thread, which starts at the first write.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._reset()
        # a forked process writes neither the lines of its parent again nor has a thread yet
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        # `SimpleQueue.put` may be interrupted by a signal handler that calls it
        self._waiting: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        self._start_once = threading.Lock()
        # Only the thread changes `_done` and `_reported`.
        self._accepted = self._done = self._dropped = self._reported = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Pass lines to the thread, or drop them."""
        if self._accepted - self._done > MAX_WAITING_BYTES:
            self._dropped += data.count(b"\n")
        else:
            self._accepted += len(data)
            self._put(bytes(data))
        return len(data)

    def mark(self) -> threading.Event:
        """Return an event that is set when all lines before it have been written or lost."""
        event = threading.Event()
        self._put(event)
        return event

    def _put(self, item: bytes | threading.Event) -> None:
        self._waiting.put(item)
        if self._start_once.acquire(blocking=False):
            # The thread takes no signals: the main thread may have blocked them to defer them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                threading.Thread(target=self._run, name="background output", daemon=True).start()
            except RuntimeError:  # The system allows no further thread; the next line tries again.
                self._start_once.release()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _run(self) -> None:
        file = LineFile(self._descriptor)
        while True:
            items = [self._waiting.get()]
            while not self._waiting.empty():
                items.append(self._waiting.get())
            # read after the queue was emptied, so that the report follows the lines before the gap
            dropped = self._dropped
            lines = [item for item in items if isinstance(item, bytes)]
            report = [_describe_loss(dropped - self._reported)] if dropped > self._reported else []
            try:
                file.write_lines([*lines, *report])
                self._reported = dropped
            except OSError:
                self._dropped += sum(line.count(b"\n") for line in lines)
            self._done += sum(map(len, lines))
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()


def _describe_loss(lines: int) -> bytes:
    return b"Warning: this output could not be written in time; lines missing above: %d.\n" % lines


def write_in_background() -> None:
    """Let a thread write what this process prints to standard output and standard error.

    Commands that serve call this function before they print or log. Streams that were replaced stay
    as they are.
    """
    files: list[BackgroundFile] = []
    for number, name in (2, "stderr"), (1, "stdout"):
        stream: TextIO | None = getattr(sys, name)
        with suppress(OSError, AttributeError):
            if stream is None or stream.fileno() != number or isinstance(stream.buffer, BackgroundFile):
                continue
            stream.flush()
            # one thread for both streams keeps the order of their lines in one file
            shared = [file for file in files if os.path.sameopenfile(file.fileno(), number)]
            file = shared[0] if shared else BackgroundFile(number)
            setattr(
                sys, name, io.TextIOWrapper(cast(BinaryIO, file), stream.encoding, stream.errors, line_buffering=True)
            )
            files.append(file)
            _replaced.append(stream)
    if files:
        atexit.register(finish_output)


def finish_output() -> None:
    """Wait until all printed lines have been written, for at most EXIT_TIMEOUT."""
    deadline = time.monotonic() + EXIT_TIMEOUT
    for stream in (sys.stdout, sys.stderr):
        file = getattr(stream, "buffer", None)
        if isinstance(file, BackgroundFile):
            stream.flush()
            file.mark().wait(max(deadline - time.monotonic(), 0))
