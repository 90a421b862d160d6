"""Tests of one group run in one worker, which starts the servers of the group once."""

import os

import pytest


@pytest.mark.xdist_group("groups")
def test_a_group_reaches_the_scheduler(request):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("needs workers: pytest -n 2 --dist loadgroup")
    assert request.node.nodeid.endswith("@groups")
