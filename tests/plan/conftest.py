"""The fixture `models`: published models' shapes."""

from types import ModuleType

import pytest

from tests.plan import published_shapes


@pytest.fixture(scope="session")
def models() -> ModuleType:
    """Return the module of the shapes: `models.LLAMA31_8B`, `models.shapes_of(hub_id, ...)` and others."""
    return published_shapes
