"""Print how much of the first prompt of a client's second session is in the cache.

Run it as `python -m tests.clients.second_sessions`.

The clients are the packages that their users install, each in an environment of its own (.cache/test-clients), so this
is no part of `make test`. Both sessions are processes of their own and ask different questions. A scripted engine with
SmolLM2's tokenizer notes the prompts; what whole blocks of 32 tokens of earlier prompts cover counts as cached.
"""

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from llmops.gateway.settings import GatewaySettings
from llmops.gateway.text.tokenizer import TextTokenizer
from tests.support.engines import smollm2_engine
from tests.support.gateway_stack import card_of, serving
from tests.support.processes import commands
from tests.support.scripted_triton import ScriptedTriton, Step

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".cache" / "test-clients"
BLOCK = 32
QUESTIONS = ("Which lines of app.py stop the engine?", "Rename the class that ends silent streams.")
#: The share of the second session's first prompt that may have to be computed.
MAX_UNCACHED = 0.10
#: The file that the clients work on, of the size that they are used with.
APP = (HERE.parents[1] / "gateway" / "generation" / "answer.py").read_text()


@dataclass(frozen=True)
class Client:
    """A client: what pip or npm installs, and the command that asks one question."""

    requirements: tuple[str, ...]
    command: Callable[[Path, str, str], list[str]]
    npm: bool = False


def sdk(name: str) -> Callable[[Path, str, str], list[str]]:
    script = str(HERE / "sdk_sessions.py")
    return lambda installed, url, question: [str(installed / "bin" / "python"), "-P", script, name, url, question]


def aider(installed: Path, url: str, question: str) -> list[str]:
    quiet = ["--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--no-show-model-warnings"]
    command = [str(installed / "bin" / "aider"), "--model", "openai/tiny", *quiet, "--no-stream", "--no-pretty"]
    return [*command, "--message", question, "app.py"]


def cline(installed: Path, url: str, question: str) -> list[str]:
    program = str(installed / "node_modules" / ".bin" / "cline")
    provider = ["-p", "openai-compatible", "-k", "none", "-m", "tiny", "-b", f"{url}/v1"]
    setup, run = shlex.join([program, "auth", *provider]), shlex.join([program, "--json", "--retries", "1", question])
    return ["sh", "-c", f"{setup} && {run}"]


CLIENTS = {
    "openai-agents": Client(("openai-agents==0.24.0",), sdk("openai-agents")),
    "pydantic-ai": Client(("pydantic-ai-slim[openai]==2.68.0",), sdk("pydantic-ai")),
    "aider": Client(("aider-chat==0.86.2",), aider),
    "cline": Client(("cline@3.0.65",), cline, npm=True),
}


def install(name: str, client: Client) -> Path:
    """Return the folder with a client, which is installed if it is missing."""
    folder = CACHE / f"session-{name}"
    done, wanted = folder / "installed.txt", "\n".join(client.requirements)
    if not done.is_file() or done.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if client.npm:
            command = ["npm", "install", "--no-audit", "--no-fund", *client.requirements]
        else:
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            command = [str(folder / "bin" / "pip"), "install", "-q", "--no-compile", *client.requirements]
        subprocess.run(command, check=True, cwd=folder)
        done.write_text(wanted)
    return folder


def ask(client: Client, installed: Path, url: str, question: str, folder: Path) -> None:
    """Ask one question in a new process, with a home and a project that are as new."""
    for name in ("home", "project"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
    (folder / "project" / "app.py").write_text(APP)
    own = {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), "OPENAI_API_KEY": "none"}
    own |= {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_BASE_URL": f"{url}/v1"}
    command = client.command(installed, url, question)
    options = {"cwd": folder / "project", "env": own, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        run = subprocess.run(command, timeout=180, **options)
    finally:
        # Cline leaves a daemon, which names its project
        for pid, line in commands().items():
            if str(folder / "project") in line:
                os.kill(pid, signal.SIGTERM)
    if run.returncode:
        raise click.ClickException(f"{command[0]} failed:\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}")


def uncached(prompt: Sequence[int], earlier: Sequence[Sequence[int]]) -> int:
    """Return the tokens of a prompt that no whole block of an earlier prompt covers."""
    common = 0
    for one in earlier:
        pairs = zip(prompt, one, strict=False)
        common = max(common, next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(one))))
    return len(prompt) - common // BLOCK * BLOCK


async def measure(names: Sequence[str], folder: Path) -> dict[str, tuple[int, int]]:
    """Return the tokens of the second session's longest prompt, and those that are not cached, by client."""
    tokenizer_dir = smollm2_engine() / "tokenizer"
    tokenizer = TextTokenizer(tokenizer_dir)
    card = {**card_of(tokenizer_dir, tokenizer), "max_seq_len": 131_072, "end_ids": [2]}
    answer = tokenizer.encode("It is in line 10.")
    triton = ScriptedTriton(card, lambda _: [*(Step((one,)) for one in answer), Step((2,)), Step(final=True)])
    await triton.start()
    found = {}
    try:
        async with serving(GatewaySettings(triton=f"127.0.0.1:{triton.port}")) as (client, _):
            for name in names:
                installed = await asyncio.to_thread(install, name, CLIENTS[name])
                prompts: list[list[list[int]]] = []
                for question in QUESTIONS:
                    triton.requests.clear()
                    url = str(client.base_url).rstrip("/")
                    await asyncio.to_thread(ask, CLIENTS[name], installed, url, question, folder)
                    prompts.append([one["input_ids"] for one in triton.requests])
                longest = max(prompts[1], key=len)
                found[name] = len(longest), uncached(longest, prompts[0])
    finally:
        await triton.stop()
    return found


@click.command()
@click.argument("names", metavar="[CLIENT]…", nargs=-1, type=click.Choice(list(CLIENTS)))
def main(names: Sequence[str]) -> None:
    """Print what of each client's second session has to be computed. Exits 1 if it is more than a tenth."""
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(names or list(CLIENTS), Path(folder)))
    for name, (tokens, rest) in found.items():
        print(f"{' '.join(CLIENTS[name].requirements)}: {rest:,} of {tokens:,} tokens uncached ({rest / tokens:.1%})")
    if any(rest > MAX_UNCACHED * tokens for tokens, rest in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
