"""Fixtures for tests of the gateway: a gateway over HTTP in front of a scripted Triton."""

from pathlib import Path

import pytest
import pytest_asyncio

from llmops.gateway.text.tokenizer import TextTokenizer
from tests.support.browser import started_browser
from tests.support.gateway_stack import card_of, running
from tests.support.tokenizer_files import write_tokenizer
from tests.support.waiting import GENEROUS


@pytest.fixture(autouse=True)
def patient_with_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still is no store and no provider that is away."""
    for place in ("auth.keys.STORE", "auth.jwks.FETCH", "usage.billing.STORE", "usage.usage_check.DRAIN"):
        monkeypatch.setattr(f"llmops.gateway.{place}_TIMEOUT", GENEROUS)


@pytest.fixture(autouse=True)
def own_conversations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Conversations of gateways without a store are each test's own."""
    monkeypatch.setattr("llmops.gateway.api.conversation_routes.cached_store", lambda: tmp_path / "store.db")


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir):
    return TextTokenizer(tokenizer_dir)


@pytest.fixture
def card(tokenizer_dir, tokenizer):
    return card_of(tokenizer_dir, tokenizer)


@pytest.fixture
async def stack(card, tokenizer):
    async with running(card, tokenizer) as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser():
    async with started_browser() as made:
        yield made
