import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import write_checkpoint

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


class Builder:
    """Runs `llmops` commands in forks of a process that has everything loaded; see builder.py."""

    def __init__(self, source: Path, cache: Path):
        self.cache = cache
        command = [sys.executable, "-m", "tests.interrupted.builder", source]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=Path(__file__).parents[2])
        assert self.process.stdout.readline() == "ready\n"

    def begin(self, *argv, env=None, **order):
        order |= {"argv": list(map(str, argv)), "env": {"LLMOPS_CACHE": str(self.cache), **(env or {})}}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def end(self):
        return json.loads(self.process.stdout.readline())

    def __call__(self, *argv, env=None, **order):
        self.begin(*argv, env=env, **order)
        return self.end()


@pytest.fixture(scope="session")
def builder(source, tmp_path_factory):
    found = Builder(source, tmp_path_factory.mktemp("cache"))
    yield found
    found.process.stdin.close()
    found.process.wait()


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A Llama of two layers whose quality figures pass the gates."""
    return write_checkpoint(tmp_path_factory.mktemp("source") / "tiny", "llama", fitted=True, **SIZES)
