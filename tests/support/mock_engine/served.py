"""The mock engine on the real Triton with the gateway in front: what most benchmarks measure on."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.mock_engine.repository import make_mock_engine
from tests.support.stack import Service, gateway, triton


@contextlib.contextmanager
def mock_engine(engine: Path, period: float, **options: Any) -> Iterator[tuple[Service, Service]]:
    """(Triton, gateway), ready; a token each `period` seconds. `options` as of `make_mock_engine`."""
    with served_mock_engine(engine, period, **options) as server, gateway(server.address) as front:
        yield server, front


@contextlib.contextmanager
def served_mock_engine(engine: Path, period: float, **options: Any) -> Iterator[Service]:
    """Triton alone, for a gateway that is started in another way."""
    with tempfile.TemporaryDirectory() as folder:
        repository = make_mock_engine(engine, Path(folder, "repository"), period, **options)
        with triton(repository) as server:
            yield server
