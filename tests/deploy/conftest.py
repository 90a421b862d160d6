"""The real tools that deployments are tested with, fetched once into .cache."""

import pytest

from llmops.errors import ServerError
from tests.gateway.conftest import card, tokenizer, tokenizer_dir
from tests.support.debian_packages import program

__all__ = ["card", "tokenizer", "tokenizer_dir"]


def debian(name: str, package: str, *libraries: str) -> list[str]:
    try:
        return program(name, package, *libraries)
    except ServerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def promtool() -> list[str]:
    return debian("promtool", "prometheus")
