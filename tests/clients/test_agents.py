"""Codex and Claude Code from npm edit a file through the gateway, and talk to nothing else.

A mock engine on the real Triton plays a model that can program.
"""

import json
import shutil
import subprocess
from itertools import pairwise

import pytest

from llmops.sequences import common_prefix_length
from tests.clients.agents import CONTEXT, DONE, PATCH, TASK, ClaudeCode, Codex
from tests.clients.conftest import HERE, locked, needs
from tests.clients.recording import no_way_out, recorded_gateway
from tests.support.mock_engine.repository import make_mock_engine
from tests.support.stack import ready_triton

# the first test installs the agents
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def installed():
    """The folder with the agents of tests/clients/agents/package.json, as npm installs them."""
    if shutil.which("npm") is None:
        needs("node 20 or later with npm, such as from https://nodejs.org, to install Codex and Claude Code")
    with locked("agents") as folder:
        folder.mkdir(exist_ok=True)
        done, lock = folder / "node_modules" / ".package-lock.json", folder / "package-lock.json"
        wanted = (HERE / "agents" / "package-lock.json").read_bytes()
        if not done.is_file() or not lock.is_file() or lock.read_bytes() != wanted:
            for name in ("package.json", "package-lock.json", ".npmrc"):
                shutil.copyfile(HERE / "agents" / name, folder / name)
            command = ["npm", "ci", "--ignore-scripts"]
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=600)
    return folder


@pytest.fixture(scope="module")
def replay(tmp_path_factory):
    """The folder with the mock engine's rules and the prompts that it got."""
    return tmp_path_factory.mktemp("replay")


@pytest.fixture(scope="module")
def replaying(engine_dir, replay, tmp_path_factory):
    """A gateway in front of a mock engine that follows the rules in `replay`: its URL and what it was asked."""
    repository = make_mock_engine(engine_dir, tmp_path_factory.mktemp("mock") / "repository", 0.001, replay=replay)
    with ready_triton(repository) as server, recorded_gateway(server.grpc_address, "mock") as recorded:
        yield recorded


@pytest.fixture
def played(installed, replay, replaying, tmp_path):
    """Let an agent do the task. Returns the agent, its output, the exchanges and the prompts rendered from them."""
    url, exchanges = replaying

    def play(kind):
        exchanges.clear()
        (replay / "prompts.jsonl").unlink(missing_ok=True)
        with no_way_out() as (proxy, asked):
            agent = kind(installed, tmp_path, proxy)
            (replay / "rules.json").write_text(json.dumps([vars(step) for step in agent.steps]))
            output = agent.ask(url, "mock")
        assert asked == []
        prompts = [json.loads(line) for line in (replay / "prompts.jsonl").read_text().splitlines()]
        return agent, output, exchanges[:], prompts

    return play


def conversation(prompt):
    """The end of a prompt, from the user's task on, without the template's marks."""
    return prompt[prompt.rindex(TASK) :].replace("<|im_start|>", "").replace("<|im_end|>", "")


def tools_of(prompt):
    """The definitions of the functions in a prompt."""
    lines = prompt[prompt.index("<tools>\n") : prompt.index("\n</tools>")].splitlines()[1:]
    return [json.loads(line)["function"] for line in lines]


def test_codex_edits_a_file(played):
    agent, output, exchanges, prompts = played(Codex)
    assert (agent.project / "greeting.txt").read_text() == "goodbye world\n"
    events = [json.loads(line) for line in output.splitlines()]
    assert [event["item"]["text"] for event in events if event.get("item", {}).get("type") == "agent_message"] == [DONE]

    # -- what Codex sent
    assert [(one.method, one.path, one.status) for one in exchanges] == [("POST", "/v1/responses", 200)] * 4
    bodies = [one.body for one in exchanges]
    for body, one in zip(bodies, exchanges, strict=True):
        assert (body["model"], body["stream"], body["store"]) == ("mock", True, False)
        warning = "The tool 'web_search' was not offered to the model, because the gateway runs no tools itself."
        assert one.headers["x-llmops-warnings"] == warning
        assert one.headers["x-llmops-ignored"] == "client_metadata, include, reasoning.summary"
    kinds = {tool.get("name", tool["type"]): tool["type"] for tool in bodies[0]["tools"]}
    assert (kinds["exec_command"], kinds["multi_agent_v1"]) == ("function", "namespace")
    assert kinds["web_search"] == "web_search"
    # each request repeats the one before it, and adds the answer to it and what the call gave
    grown = [body["input"] for body in bodies]
    for before, after in pairwise(grown):
        assert after[: len(before)] == before
        assert [item["type"] for item in after[len(before) :]] == ["function_call", "function_call_output"]
    calls = [item for item in grown[-1] if item["type"] == "function_call"]
    assert [(one.get("namespace"), one["name"], json.loads(one["arguments"])) for one in calls] == [
        ("multi_agent_v1", "close_agent", {"target": "nobody"}),
        (None, "exec_command", {"cmd": "cat greeting.txt"}),
        (None, "exec_command", {"cmd": PATCH}),
    ]

    # -- what the gateway rendered from it
    assert len(prompts) == 4
    flat = []
    for tool in bodies[0]["tools"]:
        members = tool["tools"] if tool["type"] == "namespace" else [tool] if tool["type"] == "function" else []
        space = tool["name"] + "__" if tool["type"] == "namespace" else ""
        flat += [(space + one["name"], one["description"], one["parameters"]) for one in members]
    for prompt, body in zip(prompts, bodies, strict=True):
        texts = [part["text"] for item in body["input"] if item["type"] == "message" for part in item["content"]]
        assert all(text.strip() in prompt for text in texts)
        assert [(tool["name"], tool["description"], tool["parameters"]) for tool in tools_of(prompt)] == flat
    outputs = [item["output"] for item in grown[-1] if item["type"] == "function_call_output"]
    said = [step.answer for step in agent.steps[::-1]]
    form = "\nassistant\n{}\nuser\n<tool_response>\n{}\n</tool_response>".format
    assert conversation(prompts[-1]) == TASK + "".join(map(form, said, outputs)) + "\nassistant\n"


def test_claude_code_edits_a_file(played):
    agent, output, exchanges, prompts = played(ClaudeCode)
    assert (agent.project / "greeting.txt").read_text() == "goodbye world\n"
    result = json.loads(output)
    assert (result["result"], result["is_error"]) == (DONE, False)
    assert result["modelUsage"]["mock"]["contextWindow"] == CONTEXT

    # -- what Claude Code sent
    assert [(one.method, one.path, one.status) for one in exchanges] == [("POST", "/v1/messages", 200)] * 3
    bodies = [one.body for one in exchanges]
    for body, one in zip(bodies, exchanges, strict=True):
        assert (body["model"], body["stream"], body["max_tokens"]) == ("mock", True, 32000)
        assert "x-llmops-warnings" not in one.headers
        assert {"Read", "Edit", "Bash"} <= {tool["name"] for tool in body["tools"]}
    grown = [body["messages"] for body in bodies]
    for before, after in pairwise(grown):
        assert [bare(message) for message in after[: len(before)]] == [bare(message) for message in before]
        assert [message["role"] for message in after[len(before) :]] == ["assistant", "user"]
    blocks = [block for message in grown[-1] if isinstance(message["content"], list) for block in message["content"]]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    file = str(agent.project / "greeting.txt")
    edit = {"file_path": file, "old_string": "hello", "new_string": "goodbye", "replace_all": False}
    assert [(one["name"], one["input"]) for one in calls] == [("Read", {"file_path": file}), ("Edit", edit)]

    # -- what the gateway rendered from it
    assert len(prompts) == 3
    for prompt, body in zip(prompts, bodies, strict=True):
        assert all(text.strip() in prompt for text in texts_of(body))
        offered = [(tool["name"], tool["description"], tool["parameters"]) for tool in tools_of(prompt)]
        assert offered == [(tool["name"], tool["description"], shown(tool["input_schema"])) for tool in body["tools"]]
    results = [block["content"] for block in blocks if block["type"] == "tool_result"]
    written = [json.dumps({"name": one["name"], "arguments": one["input"]}) for one in calls]
    form = "assistant\n<tool_call>\n{}\n</tool_call>\nuser\n<tool_response>\n{}\n</tool_response>\n".format
    assert len(written) == len(results)
    assert conversation(prompts[-1]).endswith("".join(map(form, written, results)) + "assistant\n")


def texts_of(body):
    """The texts of a request's system prompt and messages, without calls and results."""
    for content in [body["system"], *(message["content"] for message in body["messages"])]:
        if isinstance(content, str):
            yield content
        else:
            texts = (block["text"] for block in content if block["type"] == "text")
            # differs in each session, so the gateway leaves it out
            yield from (text for text in texts if not text.startswith("x-anthropic-billing-header: "))


def shown(schema):
    """A schema as models are shown it: without the dialect that it is written in."""
    return {key: value for key, value in schema.items() if key != "$schema"}


def bare(message):
    """A message without the marks that say what to keep in a cache: the last message has them."""
    if isinstance(message["content"], str):
        return message["role"], [{"type": "text", "text": message["content"]}]
    blocks = [{key: value for key, value in block.items() if key != "cache_control"} for block in message["content"]]
    return message["role"], blocks


def test_a_second_session_of_claude_code_finds_its_prefix(played, tmp_path):
    """The first prompts of two sessions share at least their first nine tenths."""
    firsts, ignored = [], []
    for _ in range(2):
        for folder in ("home", "project"):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
        _, _, exchanges, prompts = played(ClaudeCode)
        firsts.append(max(prompts, key=len))
        ignored.append([one.headers.get("x-llmops-ignored", "") for one in exchanges])
    assert all("x-anthropic-billing-header" in "".join(names) for names in ignored)
    assert not any("x-anthropic-billing-header" in prompt for prompt in firsts)
    common = common_prefix_length(*firsts)
    assert common >= 0.9 * len(firsts[1]), firsts[1][common - 200 : common + 200]
