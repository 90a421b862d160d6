"""LangChain, node's openai and the Vercel AI SDK against the real stack."""

import re
from pathlib import Path

import pytest

# the first test installs the clients
pytestmark = pytest.mark.timeout(1500)
HERE = Path(__file__).parent
PYTHON = re.findall(r"^def (langchain_\w+)\(", (HERE / "frameworks.py").read_text(), re.M)
OPENAI = ["chat", "stream", "streamed tool call", "structured output", "responses", "background", "embeddings", "abort"]
AI = ["generateText", "streamText", "tools", "streamed tool call", "structured output", "abort"]
NODE = [f"openai {check}" for check in OPENAI]
NODE += [f"ai {provider} {check}" for provider in ("responses", "chat", "compatible") for check in AI]
NODE += ["ai responses streamObject", "ai compatible streamObject", "ai embed", "ai compatible embed"]


@pytest.mark.parametrize("check", PYTHON)
def test_python(framework_results, check):
    assert framework_results[check] == "ok"


@pytest.mark.parametrize("check", NODE)
def test_node(node_results, check):
    assert node_results[check] == "ok"
