"""LiteLLM's proxy beside the gateway: `python -m llmops.perf.lab.benchmarks.beside_litellm ENGINE`.

Both have a key with limits on requests and tokens, of a team (tenant) with the same, kept in Valkey, and the same mock
engine behind them, the proxy by way of an open gateway, whose CPU is not counted.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from llmops.perf.lab.benchmarks.accounts import Front, Round, fronts, one_round
from llmops.perf.lab.harness.figures import Section
from llmops.perf.lab.harness.script import script
from llmops.perf.lab.harness.servers import Valkey
from llmops.perf.lab.peers.litellm import KEY, litellm

ROUNDS = 3
# fewer of everything, because it is slower
REQUESTS, STREAMS, CALM, CALM_REQUESTS = 150, 16, 4.0, 32


def measure(engine: Path) -> Section:
    """Both by turns, and the ratios."""
    text = (
        "The same load by turns: 64 tokens in; a key with limits of its own and of its team, counted in Valkey; the "
        "same mock engine behind both. The gateway renders, tokenises, asks PostgreSQL and bills; the proxy gets its "
        "key from a function, and writes no spend."
    )
    section = Section(
        "LiteLLM's proxy beside the gateway", "python -m llmops.perf.lab.benchmarks.beside_litellm ENGINE", text
    )
    with (
        section,
        fronts(engine, ("bare", "shared")) as known,
        Valkey() as valkey,
        litellm(known["bare"].service.address, valkey.port) as proxy,
    ):
        _compare({"gateway": known["shared"], "LiteLLM": Front(proxy, KEY)}, section)
    section.note(
        "LiteLLM's own keys and spend need Prisma's query engine, which is on no package registry: its key comes from "
        "`custom_auth` here, which costs it less."
    )
    return section


def _compare(known: dict[str, Front], section: Section) -> None:
    rounds: dict[str, list[Round]] = {name: [] for name in known}
    for turn in range(ROUNDS):
        for name in sorted(known, reverse=bool(turn % 2)):
            rounds[name].append(one_round(known[name], REQUESTS, STREAMS, CALM, CALM_REQUESTS))
        for what, unit in (("request", "µs/request"), ("token", "µs/token"), ("p50", "ms"), ("p99", "ms")):
            label = f"CPU, {STREAMS} streams" if what == "token" else "CPU" if what == "request" else f"latency {what}"
            for name in known:
                section.add(f"{name}: {label}", statistics.median(getattr(one, what) for one in rounds[name]), unit)
            pairs = zip(rounds["LiteLLM"], rounds["gateway"], strict=True)
            ratio = statistics.median(getattr(theirs, what) / getattr(ours, what) for theirs, ours in pairs)
            section.add(f"LiteLLM / gateway: {label}", ratio, "times")
        section.progress((turn + 1) / ROUNDS)


if __name__ == "__main__":
    script(measure, "ENGINE", "LiteLLM's proxy against the gateway, with the tokenizer of ENGINE.")()
