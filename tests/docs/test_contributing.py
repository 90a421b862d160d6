"""The worked examples of CONTRIBUTING.md apply to the tree and do what they promise, each in a copy of it."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = dict(re.findall(r"### (.+?)\n.*?```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL))

TRIALS = {
    "An endpoint": """
from starlette.testclient import TestClient
from llmops.gateway.app import create_app
from llmops.gateway.settings import GatewaySettings
client = TestClient(create_app(GatewaySettings()))
assert client.post("/v1/words", json={"text": "one two three"}).json() == {"words": 3}
assert client.post("/v1/words", json={"text": 5}).status_code == 400
assert "/v1/words" in client.get("/openapi.json").json()["paths"]
""",
    "A parser of tool calls": """
from llmops.gateway.generation.parsers.families import PARSERS, detect_family
assert detect_family("{{ tools }} [TOOL]") == "ace"
parser = PARSERS["ace"]()
found = [*parser.feed('Wait. [TOOL]{"name": "look", "argu'), *parser.feed('ments": {"at": 1}}'), *parser.finish()]
calls = [piece for piece in found if hasattr(piece, "arguments")]
assert [piece.name for piece in calls if piece.name] == ["look"], found
assert "".join(piece.arguments for piece in calls) == '{"at": 1}', found
""",
    "A limit of a request": """
import os
from llmops.gateway.settings import load_settings
os.environ["LLMOPS_LIMITS__QUERY_CHARACTERS"] = "7"
assert load_settings().limits.query_characters == 7
from llmops.gateway.api import rerank
""",
    "A metric": """
from llmops.gateway.telemetry import metric_definitions
from llmops.gateway.telemetry.metrics import GatewayMetrics
from prometheus_client import generate_latest
metrics = GatewayMetrics()
metrics.numbers(metric_definitions.RERANKED).labels("m").inc(3)
assert 'llmops_reranked_documents_total{model="m"} 3.0' in generate_latest(metrics.registry).decode()
from llmops.gateway.api import rerank
""",
}

#: The most files that a change of this kind may have to touch.
MOST_FILES = {"An endpoint": 5, "A parser of tool calls": 3, "A limit of a request": 6, "A metric": 3}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages as they are imported: `llmops/gateway` and so on."""
    folder = tmp_path_factory.mktemp("tree")
    leave_out = shutil.ignore_patterns("__pycache__", "vendor", "lab")
    shutil.copytree(ROOT / "llmops", folder / "llmops", ignore=leave_out)
    for name in ("build", "store", "gateway", "control", "cli", "model_repository"):
        shutil.copytree(ROOT / name, folder / "llmops" / name, ignore=leave_out)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def test_every_example_is_tried():
    assert set(EXAMPLES) == set(TRIALS)


@pytest.mark.parametrize("name", TRIALS)
def test_an_example_applies_and_works(tree, name):
    files = EXAMPLES[name].count("diff --git")
    assert 1 <= files <= MOST_FILES[name]
    apply = ["git", "apply", "--recount", "-C1", "--directory", "llmops"]
    done = subprocess.run(apply, cwd=tree, input=EXAMPLES[name], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-c", TRIALS[name]]
    tried = subprocess.run(command, cwd=tree, env={"PYTHONPATH": str(tree)}, text=True, capture_output=True)
    assert tried.returncode == 0, tried.stderr


# -- The names on the pages for contributors are those of the code


LINK = re.compile(r"\[`([\w.]+)`\]\(([\w./-]+\.py)\)")
PAGES = [ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"]


def names_in(path: Path) -> set[str]:
    """Return the top-level names of a module, and `Class.method` for methods."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names |= {node.name} | {f"{node.name}.{one.name}" for one in node.body if hasattr(one, "name")}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {one.id for one in targets if isinstance(one, ast.Name)}
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_named_thing_is_where_the_page_says(page):
    links = LINK.findall(page.read_text())
    assert len(links) >= 10
    for name, target in links:
        module = (page.parent / target).resolve()
        assert module.is_file(), f"{page.name}: {target}"
        assert name in names_in(module), f"{page.name}: {name} is not in {target}"
