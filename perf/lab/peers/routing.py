"""Routers on one trace: ours, SMG's and Dynamo's. `python -m llmops.perf.lab.peers.routing ENGINE`.

Conversations with shared system prompts, sent at the same times to each; what is compared is the share of the prompts
that engines found in their caches, and how even their work was. SMG routes to the same mock engines as we, each behind
a gateway of its own; Dynamo to its own mockers, with caches and batches of the same size and steps of about the same
length.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.perf.lab.fleet.replay import Body, replay
from llmops.perf.lab.fleet.stage import Engines, engines, front
from llmops.perf.lab.fleet.trace import Asked, Talks, ceiling, words_of
from llmops.perf.lab.harness.figures import Section
from llmops.perf.lab.harness.script import script
from llmops.perf.lab.harness.servers import free_port
from llmops.perf.lab.harness.stack import Service, process, wait_ready
from llmops.perf.lab.mock_engine.planned import constant
from llmops.perf.lab.peers.dynamo import dynamo
from llmops.perf.lab.peers.environment import peer_python

REPLICAS, BLOCKS, SIZE, PLACES, CHUNK = 4, 2048, 16, 16, 1024
# steps of the mock engines: seconds, and more of them per sequence and per prompt token
STEP, SEQUENCE, TOKEN = 0.04, 0.002, 0.0003
TALKS = Talks(rate=1.0, sessions=64, pace=0.055)
# its own mocker at this pace takes about as long
SPEED = "0.1"
MOCKER = [
    *("--block-size", str(SIZE), "--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", str(PLACES)),
    *("--max-num-batched-tokens", str(CHUNK), "--speedup-ratio", SPEED),
]


@dataclass(frozen=True)
class Router:
    """Somebody who routes. `address` ends in /v1; `counts`: requests that each engine has finished."""

    address: str
    counts: Callable[[], Sequence[int]]


def measure(engine: Path) -> Section:
    text = (
        f"{TALKS.sessions} conversations of {TALKS.turns} turns over {REPLICAS} engines with {BLOCKS} blocks of {SIZE} "
        f"tokens and {PLACES} sequences; {TALKS.apps} system prompts of {TALKS.system} tokens. One run each."
    )
    section = Section("Routers beside ours", "python -m llmops.perf.lab.peers.routing ENGINE", text)
    with section:
        trace = TALKS.asked(words_of(engine))
        body = _text(engine)
        section.add("one cache without an end", 100 * ceiling(trace, SIZE, None), "%")
        for name, router in ROUTERS.items():
            with router(engine) as one:
                _measure(section, name, one, trace, body)
    return section


def _measure(section: Section, name: str, router: Router, trace: Sequence[Asked], body: Body) -> None:
    went = asyncio.run(replay(router.address, trace, body))
    counts = router.counts()
    section.add(f"{name}: answered", len(went.ok), "", len(trace), "least")
    section.add(f"{name}: found in a cache", 100 * went.hit_rate, "%")
    section.add(f"{name}: busiest engine, of the mean", max(counts) * len(counts) / max(sum(counts), 1), "")
    section.add(f"{name}: TTFT p50", 1000 * went.of(lambda one: one.ttft, 50), "ms")
    section.add(f"{name}: TTFT p95", 1000 * went.of(lambda one: one.ttft, 95), "ms")
    for one in [one for one in went.seen if not one.ok][:3]:
        section.note(f"{name}: {one.status} {one.error[:200]}")


def _text(engine: Path) -> Body:
    """Not everybody takes token ids."""
    from tokenizers import Tokenizer

    folder = engine / EngineManifest.load(engine).tokenizer.directory
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def body(asked: Asked) -> dict[str, Any]:
        return {"prompt": tokenizer.decode(list(asked.ids))}

    return body


@contextlib.contextmanager
def ours(engine: Path, settings: dict[str, Any] | None = None) -> Iterator[Router]:
    with _mocks(engine) as stage, front(stage.replicas, settings or {}) as gateway:
        yield Router(gateway.address, stage.counts)


@contextlib.contextmanager
def smg(engine: Path) -> Iterator[Router]:
    """SMG's gateway before one of ours per engine: it knows them as OpenAI servers over HTTP."""
    python = peer_python("smg")
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(_mocks(engine))
        workers = [stack.enter_context(front([one], {})) for one in stage.replicas]
        urls = [one.address.removesuffix("/v1") for one in workers]
        port = str(free_port())
        command = [str(python.parent / "smg"), "launch", "--host", "127.0.0.1", "--port", port, "--worker-urls", *urls]
        more = ["--policy", "cache_aware", "--prometheus-port", str(free_port())]
        more += ["--log-level", "warn", "--disable-tokenizer-autoload"]
        stack.enter_context(process([*command, *more], None))
        wait_ready(f"http://127.0.0.1:{port}/readiness")
        yield Router(f"http://127.0.0.1:{port}/v1", stage.counts)


@contextlib.contextmanager
def dynamos(engine: Path, mode: str) -> Iterator[Router]:
    router = ["--router-mode", mode, "--kv-cache-block-size", str(SIZE)]
    with dynamo(engine, REPLICAS, MOCKER, router) as (frontend, mockers):
        yield Router(frontend.address, lambda: [_requests(one) for one in mockers])


def _requests(mocker: Service) -> int:
    with urllib.request.urlopen(mocker.metrics, timeout=10) as response:
        page = response.read().decode()
    counted = r'^dynamo_component_request_duration_seconds_count\{[^}]*dynamo_endpoint="generate"[^}]*\} (\S+)'
    return sum(int(float(value)) for value in re.findall(counted, page, re.MULTILINE))


def _mocks(engine: Path) -> contextlib.AbstractContextManager[Engines]:
    paged = constant(STEP, TOKEN, BLOCKS, SEQUENCE, max_batch_size=PLACES, max_num_tokens=CHUNK)
    return engines(engine, replace(paged, tokens_per_block=SIZE), REPLICAS)


ROUTERS: dict[str, Callable[[Path], contextlib.AbstractContextManager[Router]]] = {
    "ours": ours,
    "ours, with a queue": lambda engine: ours(engine, {"tiers": {"standard": {"max_wait": "60s"}}}),
    "SMG cache_aware": smg,
    "Dynamo kv": lambda engine: dynamos(engine, "kv"),
    "Dynamo round-robin": lambda engine: dynamos(engine, "round-robin"),
}

if __name__ == "__main__":
    script(measure, "ENGINE", "Send one trace through each router, with the tokenizer of ENGINE.")()
