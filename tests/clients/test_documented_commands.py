"""Every command of README and docs runs here, or its block says that it needs a GPU, a cluster or a network.

Pages run with scratch folders of their own, in front of the real Triton. Addresses, paths and loads are changed to
those of this machine; options and order are the page's.
"""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.clients.documented import MARKS, PAGES, ROOT, TYPED, blocks_of, script_of
from tests.support import forked_cli
from tests.support.engines import UP_CACHE, UP_ENGINE
from tests.support.processes import runs
from tests.support.servers import free_port
from tests.support.tiny_models import write_checkpoint
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
RUN = [page for page in PAGES if any(block.info == "console" for block in blocks_of(page))]
#: What is written otherwise on every page: regular expressions and what takes their place.
EVERYWHERE = {
    r"--host 0\.0\.0\.0": "--host 127.0.0.1",
    r"/var/lib/node_exporter": ".",
    # the small model may not find an end by itself
    r'"messages": ?\[': '"max_tokens": 16, "messages": [',
    r"(?<!\S)curl ": "curl --fail-with-body -sS ",
}
CHANGES = {
    # the test's own installation is what `make install` makes
    "README.md": {r"make install": f"make -n -C '{ROOT}' install", r"\. \.venv/bin/activate": ":"},
    "accounts.md": {
        r"postgresql://llmops:…@db/llmops": "sqlite:///store.db",
        r"sk-llmops-…": "$(llmops key create --tenant acme --user root@acme.example --scopes admin)",
        r"https://control\.example": "http://127.0.0.1:9100",
        r"\$\(get-token\)": "$KEY",
    },
    "bench.md": {
        r"127\.0\.0\.1:18999": "127.0.0.1:9000",
        r"-c 32 -n 200": "-c 2 -n 4 -o 8",
        r"-r 8 -d 60s": "-r 2 -d 2s -o 8",
        r"-c 32 ": "-c 2 -n 4 -o 8 ",
        r"-r 40 -d 5s -i lognormal:300,0\.8 -o uniform:16,64": "-r 2 -d 2s -i lognormal:30,0.8 -o uniform:4,8",
        # objectives of a GPU
        r"ttft:\d+ms": "ttft:60s",
        r"tpot:\d+ms": "tpot:60s",
        r"--compare before\.json after\.json": "--compare before.json before.json",
    },
    "fleet.md": {r"10\.0\.0\.[12]:8001": "127.0.0.1:8001", r"10\.0\.1\.1:9000": "127.0.0.1:9000"},
    "limits.md": {r"curl --fail-with-body": "curl"},
    "gateway.md": {
        # the second request is refused, as the page shows
        r"curl --fail-with-body (.*logit_bias)": r"curl \1",
        r"--port 9000": "",
    },
    "openai.md": {
        r"--count 20000": "--count 200",
        # from the checkout
        r"python -m tests\.": f"PYTHONPATH='{ROOT}' python -m tests.",
    },
    "operate.md": {r"gateway-\d:9000": "127.0.0.1:9000", r"llmops top": "llmops top --once -i 1s"},
    # without filters the shipped prompts are answered
    "safety.md": {r"--model smollm2": "--model smollm2 --list clean.jsonl"},
    # tests/verify/test_runtimes.py runs all parts on a tiny engine: SmolLM2 takes half a minute for each
    "verify.md": {
        r"llmops verify +#": "llmops verify --only capacity #",
        r"--only answers --json": "--engine engines/smollm2 --triton 127.0.0.1:8001 --only capacity --json",
        r"--html report\.html": "--only capacity --html report.html",
        r"--url (\S+)": r"--url \1 --model smollm2",
    },
    "scale.md": {
        r"--replicas 16 --rate 84\.2 -d 420s --skip 240s": "--replicas 2 --rate 2 -d 20s --skip 5s",
        r"--rate 30 -d 90m": "--rate 2 -d 1m",
    },
}
# pages that need a file that no command of theirs makes
BEFORE = {
    "safety.md": (
        "for n in 1 2 3 4 5 6 7 8 9; do\n"
        """echo '{"text": "you are a fool '$n'", "category": "abuse"}'; echo '{"text": "bread '$n'"}'\n"""
        'done > examples.jsonl; echo \'{"text": "Hello"}\' > clean.jsonl\n'
        "echo 'safety: {filters: {abuse: {kind: model, head: abuse.json}}}' > gateway.yaml\n"
    ),
    "gateway.md": (
        """for n in $(seq 24); do echo '{"text": "Prove theorem '$n'", "category": "large"}'; """
        """echo '{"text": "Say hello '$n'"}'; done > examples.jsonl\n"""
    ),
    "tensorrt-llm.md": "echo 'kv_cache_config: {free_gpu_memory_fractoin: 0.9}' > options.yaml\n",
    "scale.md": (
        "llmops plan meta-llama/Llama-3.1-8B --gpu h100-sxm --quant fp8 --isl 1000 --osl 200 --qps 1 --save plan.json\n"
        "echo 'port: 9000' > gateway.yaml\n"
    ),
}


def test_every_block_with_commands_runs_or_says_what_it_needs():
    for page in PAGES:
        for block in blocks_of(page):
            lines = block.text.splitlines()
            typed = [line for line in lines if line.startswith("$ ")]
            if not typed:
                shown = re.compile(r"llmops \w+ +[A-Z\d]|llmops \w+ listens")
                loose = [line for line in lines if TYPED.match(line) and not shown.match(line)]
                assert not loose, f"{block.where}: write commands after '$ ' in a console block: {loose[0]}"
                continue
            kind, *marks = block.info.split() or [""]
            assert kind == "console", f"{block.where}: commands stand in a block that begins with ```console"
            assert set(marks) <= MARKS.keys(), f"{block.where}: {block.info}; marks are {', '.join(MARKS)}"


def test_every_link_leads_somewhere():
    for page in [*PAGES, ROOT / "CHANGELOG.md", ROOT / "deploy" / "runbooks.md"]:
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", page.read_text("utf-8"))):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), f"{page.relative_to(ROOT)} links to {target}"
            if anchor and there.suffix == ".md":
                assert anchor in anchors_of(there), f"{page.relative_to(ROOT)} links to {target}"


def anchors_of(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(scope="module")
def engines(full_triton):
    """The folder with the engines that the real Triton serves."""
    return ROOT / ".cache" / "test-clients" / "engines"


@pytest.fixture
def scratch(tmp_path, engines):
    """A folder as a reader of any page may have it."""
    (tmp_path / "engines").mkdir()
    for name in ("smollm2", "minilm"):
        (tmp_path / "engines" / name).symlink_to(engines / name)
    return tmp_path


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(page, scratch, full_triton, base_url):
    script = BEFORE.get(page.name, "") + script_of(page, {**EVERYWHERE, **CHANGES.get(page.name, {})})
    ports = {port: str(free_port()) for port in ("8000", "8001", "8002", "9000", "9100")}
    starts = set(re.findall(r"^llmops (\w+)", script, re.M))
    if not starts & {"serve", "up"}:
        ports["8001"] = full_triton.grpc_address.rpartition(":")[2]
        ports["8002"] = str(urlsplit(full_triton.metrics_url).port)
    if not starts & {"gateway", "up"}:
        ports["9000"] = str(urlsplit(base_url).port)
    script = re.sub(r"(localhost|127\.0\.0\.1):(\d{4})\b", lambda at: f"127.0.0.1:{ports.get(at[2], at[2])}", script)
    if "./tiny" in script:
        write_checkpoint(scratch / "tiny", "llama", fitted=True)
    if "build ./llama " in script:
        write_checkpoint(scratch / "llama", "llama")
    if "cut.gguf" in script:
        (scratch / "cut.gguf").write_bytes(b"GGUF" + bytes(20))
    if "llmops build smollm2 " in script:
        # the same command has made it, so that here it finds it up to date
        (scratch / "engines" / "smollm2").unlink()
        (scratch / "engines" / "smollm2").symlink_to(UP_ENGINE)
    environment = {
        **os.environ,
        # what `up` and `verify` build is built once
        "LLMOPS_CACHE": str(UP_CACHE),
        "LLMOPS_URL": f"http://127.0.0.1:{ports['9000']}/v1",
        "DOCS_PORTS": json.dumps(ports),
        "DOCS_FORKS": f"{forked_cli.__file__},{forked_cli.server_address()}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": "",
    }
    shim = Path(__file__).with_name("llmops_in_docs.py")
    prelude = f"set -euo pipefail\nllmops() {{ '{sys.executable}' -I -S '{shim}' \"$@\"; }}\n"
    try:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        command = ["bash", "-c", prelude + script]
        run = subprocess.run(command, cwd=scratch, env=environment, text=True, timeout=400, **streams)
        assert run.returncode == 0, run.stdout[-6000:]
    finally:
        stop(scratch / "pids")


def stop(pids):
    """End the servers that a page has started, the last one first."""
    for pid in reversed(pids.read_text().split() if pids.is_file() else []):
        # one that failed at its start is gone
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGTERM)
        wait_until(lambda pid=pid: not runs(pid))
