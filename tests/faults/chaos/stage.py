"""The processes that a bill passes, all of which can be killed.

They are gateways, broker, ledger and PostgreSQL, and Valkey for the limits.
"""

import asyncio
import math
import os
import random
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.request import Request, urlopen

from llmops.errors import ServerError
from tests.support.forked_cli import ForkedProcess
from tests.support.servers import Broker, Postgres, Server, Valkey, free_port

# micro-dollars per million tokens
INPUT, CACHED, OUTPUT = 600_000, 300_000, 900_000
READY_SECONDS = 120.0
# seconds until what was killed is started again
DEAD = (0.1, 1.5)


class Program:
    """`llmops …` on a port of its own."""

    def __init__(self, folder: Path, arguments: list[str], env: dict[str, str]) -> None:
        self.port = free_port()
        self._log = folder / f"{arguments[0]}-{self.port}.log"
        self._command = [*arguments, "--port", str(self.port)]
        self._env = {**os.environ, **env}
        self._process: ForkedProcess | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self._process = ForkedProcess(self._command, self._env, log.fileno())

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def page(self, path: str, key: str = "") -> str | None:
        """None while it is not there, or not ready."""
        request = Request(self.url + path, headers={"authorization": f"Bearer {key}"} if key else {})
        with suppress(OSError), urlopen(request, timeout=5) as answer:
            return str(answer.read().decode())
        return None

    def ready(self) -> None:
        """Begun again when it ended, as by Kubernetes: without its store it does not start.

        Raises ServerError when it does not become ready.
        """
        deadline = time.monotonic() + READY_SECONDS
        while self.page("/health/ready") is None:
            if self._process is not None and self._process.poll() is not None:
                self.start()
            if time.monotonic() > deadline:
                raise ServerError(f"{self._command} did not come up:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.1)


class Stage:
    """Two gateways in front of the Triton at `triton`, and all behind them, ready; `keys` are two tenants'."""

    def __init__(self, triton: str, model: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="llmops-chaos-"))
        self.deaths: Counter[str] = Counter()
        self.broker, self.postgres, self.valkey = Broker(), Postgres(), Valkey()
        for server in (self.broker, self.postgres, self.valkey):
            server.start()
        self.keys = asyncio.run(_accounts(self.postgres.url, model))
        shared = {"LLMOPS_STORE": self.postgres.url, "LLMOPS_KAFKA__SERVERS": self.broker.servers}
        shared["LLMOPS_KAFKA__SIGNING_KEYS"] = secrets.token_hex(32)
        own = {"LLMOPS_REDIS": self.valkey.url, "LLMOPS_USAGE__OUTBOX": str(self.folder / "usage")}
        self.gateways = [Program(self.folder, ["gateway", "--triton", triton], shared | own) for _ in range(2)]
        self.control = Program(self.folder, ["control"], shared)
        for program in (*self.gateways, self.control):
            program.start()
        for program in self.gateways:
            program.ready()

    def torment(self, over: Callable[[], bool], dice: random.Random, pauses: tuple[float, float]) -> None:
        """Kill all of them, one at a time, round after round until it is `over`; they are alive afterwards.

        At least one of the gateways always serves.
        """
        victims: dict[str, Sequence[Program | Server]] = {"gateway": self.gateways, "ledger": [self.control]}
        victims |= {"broker": [self.broker], "PostgreSQL": [self.postgres], "Valkey": [self.valkey]}
        round_: list[str] = []
        while round_ or not over():
            if not round_:
                round_ = dice.sample(list(victims), len(victims))
            time.sleep(dice.uniform(*pauses))
            name = round_.pop()
            victim = dice.choice(victims[name])
            if name == "gateway":
                for program in self.gateways:
                    program.ready()
            victim.kill()
            self.deaths[name] += 1
            time.sleep(dice.uniform(*DEAD))
            victim.start()
        for program in (*self.gateways, self.control):
            program.ready()

    def said(self) -> str:
        """The last lines of each program's log."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))

    def lag(self) -> float:
        """The age of the oldest event that the ledger lacks, as the gateways have it."""
        pages = [program.page("/metrics", self.keys[0]) or "" for program in self.gateways]
        lines = [line for page in pages for line in page.splitlines() if line.startswith("llmops_usage_lag_seconds")]
        # a gateway that does not answer may have something
        return max(float(line.rpartition(" ")[2]) for line in lines) if len(lines) == len(pages) else math.inf

    def close(self) -> None:
        for program in (*self.gateways, self.control):
            program.kill()
        for server in (self.broker, self.postgres, self.valkey):
            server.close()
        shutil.rmtree(self.folder, ignore_errors=True)


async def _accounts(url: str, model: str) -> list[str]:
    from llmops.store.accounts.limits import Limits
    from llmops.store.factory import open_store
    from llmops.store.prices import Price, set_price
    from tests.support.accounts import BY, add_key

    spec = {"limits": Limits(rpm=10_000_000, tpm=1_000_000_000), "scopes": ("inference", "metrics")}
    async with await open_store(url) as store:
        async with store.write() as connection:
            await set_price(connection, Price(model, BY.at, INPUT, CACHED, OUTPUT), BY)
        return [(await add_key(store, tenant, **spec))[0] for tenant in ("acme", "umbrella")]
