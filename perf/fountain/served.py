"""The fountain on the real Triton with the gateway in front: what most benchmarks measure on."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmops.perf.fountain.repository import make_fountain
from llmops.perf.harness.stack import Service, gateway, triton


@contextlib.contextmanager
def fountain(engine: Path, period: float, **options: Any) -> Iterator[tuple[Service, Service]]:
    """(Triton, gateway), ready; a token each `period` seconds. `options` as of `make_fountain`."""
    with served_fountain(engine, period, **options) as server, gateway(server.address) as front:
        yield server, front


@contextlib.contextmanager
def served_fountain(engine: Path, period: float, **options: Any) -> Iterator[Service]:
    """Triton alone, for a gateway that is started otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        repository = make_fountain(engine, Path(folder, "repository"), period, **options)
        with triton(repository) as server:
            yield server
