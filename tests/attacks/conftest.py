"""Fixtures for attacks: a scripted engine, and a gateway in front of it, each in a process of its own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from llmops.gateway.text.tokenizer import TextTokenizer
from tests.attacks.harness import Engine, Gateway
from tests.gateway.conftest import card, tokenizer, tokenizer_dir
from tests.limits.conftest import valkey
from tests.store.conftest import by, databases, folder, kind, newest, newest_file, own_postgres, postgres, store, url
from tests.support.gateway_stack import card_of

__all__ = ["by", "card", "databases", "folder", "kind", "newest", "newest_file", "own_postgres", "postgres"]
__all__ += ["store", "tokenizer", "tokenizer_dir", "url", "valkey"]


@pytest.fixture
def programs() -> Iterator[ExitStack]:
    """Stops at the end of a test what was entered into it."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path, tokenizer: TextTokenizer) -> Iterator[Engine]:
    """An engine that answers with four tokens at once. All attacks share it: count its requests by difference."""
    made = Engine(tmp_path_factory.mktemp("engine"), card_of(tokenizer_dir, tokenizer))
    yield made
    made.stop()


@pytest.fixture
def own_engine(tmp_path: Path, programs: ExitStack, card: dict[str, object]) -> Callable[..., Engine]:
    """Start an engine of the test's own, with a long context; it ends with the test."""

    def started(tokens: int, seconds_per_token: float = 0.0) -> Engine:
        long = {**card, "max_seq_len": 100_000}
        made = Engine(tmp_path / "own-engine", long, tokens=tokens, seconds_per_token=seconds_per_token)
        programs.callback(made.stop)
        return made

    return started


@pytest.fixture
def start(tmp_path: Path, programs: ExitStack) -> Callable[..., Gateway]:
    """Start a gateway with these settings, without an engine or ready in front of one; it ends with the test."""

    def started(triton: str = "", **settings: object) -> Gateway:
        number = len(list(tmp_path.glob("gateway-*")))
        made = Gateway(tmp_path / f"gateway-{number}", triton or "127.0.0.1:9", **settings)
        programs.callback(made.stop)
        if triton:
            made.ready()
        return made

    return started
