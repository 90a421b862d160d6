"""Codex and Claude Code as users run them, cut off from all but the gateway: how each is set up and what it is told."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

TASK = "Make greeting.txt say goodbye."
DONE = "The greeting says goodbye."
#: The context of the mock engine, in tokens; both agents are told of it as docs/clients say.
CONTEXT = 262_144
# Codex talks of its fixed set of features to its vendor, whatever the model provider is
CODEX = """
model = "{model}"
model_provider = "llmops"
model_context_window = {context}
check_for_update_on_startup = false
[model_providers.llmops]
name = "llmops"
base_url = "{url}/v1"
wire_api = "responses"
stream_max_retries = 0
[analytics]
enabled = false
[features]
plugins = false
apps = false
"""
PATCH = """apply_patch <<'PATCH'
*** Begin Patch
*** Update File: greeting.txt
@@
-hello world
+goodbye world
*** End Patch
PATCH"""


@dataclass(frozen=True)
class Step:
    """A rule of the mock engine: the answer to a prompt that contains some text."""

    contains: str
    answer: str


def call(name: str, **arguments: object) -> str:
    """Return the call of a function as a model without a family of its own writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class Agent:
    """An installed agent in a home and a project of its own."""

    installed: Path
    folder: Path
    #: A proxy that every way out of the machine is led to.
    proxy: str

    @property
    def project(self) -> Path:
        return self.folder / "project"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def prepare(self) -> None:
        self.home.mkdir(parents=True)
        self.project.mkdir()
        (self.project / "greeting.txt").write_text("hello world\n")

    def run(self, command: list[str], **environment: str) -> str:
        """Run `command` in the project and return its output."""
        own = {"PATH": os.environ["PATH"], "HOME": str(self.home), "NO_PROXY": "127.0.0.1"}
        proxies = {"HTTP_PROXY": self.proxy, "HTTPS_PROXY": self.proxy}
        given = {"cwd": self.project, "env": {**own, **proxies, **environment}, "stdin": subprocess.DEVNULL}
        run = subprocess.run(command, **given, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, f"{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
        return run.stdout


class Codex(Agent):
    """OpenAI's Codex CLI, without a terminal."""

    #: The last rule holds for the first prompt, as every later prompt contains it too.
    steps = (
        Step("Success. Updated the following files:\nM greeting.txt", DONE),
        Step("Output:\nhello world", call("exec_command", cmd=PATCH)),
        Step("invalid agent id nobody", call("exec_command", cmd="cat greeting.txt")),
        Step(TASK, call("multi_agent_v1__close_agent", target="nobody")),
    )

    def ask(self, url: str, model: str) -> str:
        """Return what Codex prints."""
        self.prepare()
        (self.home / "config.toml").write_text(CODEX.format(model=model, context=CONTEXT, url=url))
        codex = str(self.installed / "node_modules" / ".bin" / "codex")
        free = "--dangerously-bypass-approvals-and-sandbox"
        return self.run([codex, "exec", "--json", "--skip-git-repo-check", free, TASK], CODEX_HOME=str(self.home))


class ClaudeCode(Agent):
    """Anthropic's Claude Code, without a terminal."""

    @property
    def steps(self) -> tuple[Step, ...]:
        file = str(self.project / "greeting.txt")
        return (
            Step("greeting.txt has been updated", DONE),
            Step("1\thello world", call("Edit", file_path=file, old_string="hello", new_string="goodbye")),
            Step(TASK, call("Read", file_path=file)),
        )

    def ask(self, url: str, model: str) -> str:
        """Return what Claude Code prints."""
        self.prepare()
        # the package's own `claude` is put in place by a script of its installation, which does not run here
        claude = str(next(self.installed.glob("node_modules/@anthropic-ai/claude-code-*/claude")))
        command = [claude, "-p", "--output-format", "json", "--dangerously-skip-permissions", TASK]
        return self.run(
            command,
            ANTHROPIC_BASE_URL=url,
            ANTHROPIC_AUTH_TOKEN="none",
            ANTHROPIC_MODEL=model,
            ANTHROPIC_DEFAULT_HAIKU_MODEL=model,
            CLAUDE_CODE_MAX_CONTEXT_TOKENS=str(CONTEXT),
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            CLAUDE_CODE_MAX_OUTPUT_TOKENS="32000",
            DISABLE_AUTOUPDATER="1",
            # Claude Code refuses to run unasked as root elsewhere
            IS_SANDBOX="1",
        )
