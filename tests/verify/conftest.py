"""`llmops verify` as a user runs it, against a real Triton."""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llmops.model_repository.launch import TritonServer
from tests.support import forked_cli
from tests.support.stack import ready_triton


@dataclass
class Verified:
    """The output of the program and its exit code."""

    code: int
    report: dict[str, Any]
    output: str

    def verdicts(self) -> dict[str, str]:
        return {one["name"]: one["verdict"] for one in self.report["results"]}

    def named(self, verdict: str) -> set[str]:
        return {name for name, found in self.verdicts().items() if found == verdict}

    def detail(self, name: str) -> str:
        return next(one["detail"] for one in self.report["results"] if one["name"] == name)


@pytest.fixture(scope="session")
def verify():
    def run(*arguments: str | Path) -> Verified:
        done = forked_cli.run("verify", "--json", *arguments)
        assert done.returncode in (0, 1), done.stderr
        return Verified(done.returncode, json.loads(done.stdout), done.stderr)

    return run


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[[Path], list[str]]]:
    """`serve(repository)`: arguments that point `verify` at a real Triton on it, which ends with the module's tests."""
    with contextlib.ExitStack() as stack:
        yield lambda repository: pointing_at(stack.enter_context(triton_on(repository)))


triton_on = functools.partial(ready_triton, exit_timeout=3, on_log=lambda line: None)


def pointing_at(server: TritonServer) -> list[str]:
    return ["--triton", server.grpc_address, "--metrics", str(server.metrics_url)]
