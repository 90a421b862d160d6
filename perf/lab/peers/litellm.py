"""LiteLLM's proxy beside the gateway: `python -m llmops.perf.lab.peers.litellm ENGINE`.

Both have a key with limits on requests and tokens, of a team (tenant) with the same, kept in one Valkey, and the same
mock engine behind them, the proxy by way of an open gateway, whose CPU is not counted.

Its own keys are in PostgreSQL by way of Prisma, whose engines are on no package registry. So it gets its key from a
function (`custom_auth`), for which it looks up nothing, and it writes no spend; the gateway asks PostgreSQL and bills.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from llmops.perf.lab.benchmarks.accounts import MANY, Front, Round, fronts, one_round
from llmops.perf.lab.harness.figures import Section
from llmops.perf.lab.harness.script import script
from llmops.perf.lab.harness.servers import Valkey, free_port
from llmops.perf.lab.harness.stack import Service, process, wait_ready
from llmops.perf.lab.mock_engine.repository import NAME
from llmops.perf.lab.peers.environment import peer_python

ROUNDS = 3
# it is slower: fewer of all
REQUESTS, STREAMS, CALM = 150, 16, 4.0
KEY = "sk-bench"
_AUTH = f"""
from litellm.proxy._types import UserAPIKeyAuth


async def check(request, api_key):
    if api_key != "{KEY}":
        raise ValueError("unknown key")
    limits = {{"tpm_limit": {MANY}, "rpm_limit": {MANY}, "team_tpm_limit": {MANY}, "team_rpm_limit": {MANY}}}
    return UserAPIKeyAuth(api_key=api_key, team_id="bench", **limits)
"""
_CONFIG = """
model_list:
  - model_name: {name}
    litellm_params: {{model: openai/{name}, api_base: "{upstream}", api_key: none}}
litellm_settings:
  cache: true
  cache_params: {{type: redis, host: 127.0.0.1, port: {port}, mode: default_off}}
general_settings: {{custom_auth: auth.check}}
"""


def measure(engine: Path) -> Section:
    """Both by turns, and the ratios."""
    text = (
        "The same load by turns: 64 tokens in; one key with limits of its own and of its team, counted in one Valkey; the same mock engine "
        "behind both. The gateway renders, tokenises, asks PostgreSQL and bills; the proxy gets its key from a function, and writes no spend."
    )
    section = Section("LiteLLM's proxy beside the gateway", "python -m llmops.perf.lab.peers.litellm ENGINE", text)
    with section, fronts(engine, ("bare", "shared")) as known, Valkey() as valkey:
        with litellm(known["bare"].service.address, valkey.port) as proxy:
            _compare({"gateway": known["shared"], "LiteLLM": Front(proxy, KEY)}, section)
    section.note(
        "LiteLLM's own keys and spend need Prisma's query engine, which is on no package registry: its key comes from `custom_auth` here, "
        "which costs it less."
    )
    return section


def _compare(known: dict[str, Front], section: Section) -> None:
    rounds: dict[str, list[Round]] = {name: [] for name in known}
    for turn in range(ROUNDS):
        for name in sorted(known, reverse=bool(turn % 2)):
            rounds[name].append(one_round(known[name], REQUESTS, STREAMS, CALM, NAME))
        for what, unit in (("request", "µs/request"), ("token", "µs/token"), ("p50", "ms"), ("p99", "ms")):
            label = f"CPU, {STREAMS} streams" if what == "token" else "CPU" if what == "request" else f"latency {what}"
            for name in known:
                section.add(f"{name}: {label}", statistics.median(getattr(one, what) for one in rounds[name]), unit)
            pairs = zip(rounds["LiteLLM"], rounds["gateway"], strict=True)
            ratio = statistics.median(getattr(theirs, what) / getattr(ours, what) for theirs, ours in pairs)
            section.add(f"LiteLLM / gateway: {label}", ratio, "times")
        section.progress((turn + 1) / ROUNDS)


@contextlib.contextmanager
def litellm(upstream: str, redis_port: int) -> Iterator[Service]:
    """The proxy in front of the OpenAI API at `upstream`, ready."""
    python, port = peer_python("litellm"), free_port()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "auth.py").write_text(_AUTH)
        config = Path(folder, "config.yaml")
        config.write_text(_CONFIG.format(name=NAME, upstream=upstream, port=redis_port))
        command = [str(python.parent.resolve() / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        # without a network it would try three times to fetch prices
        env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": "sk-0b6c3f5e9a7d48219c", "PYTHONPATH": folder}
        with process(command, None, env) as (pid, _):
            wait_ready(f"http://127.0.0.1:{port}/health/liveliness")
            yield Service(f"http://127.0.0.1:{port}/v1", pid)


if __name__ == "__main__":
    script(measure, "ENGINE", "LiteLLM's proxy against the gateway, with the tokenizer of ENGINE.")()
