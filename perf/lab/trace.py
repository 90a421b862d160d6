"""Requests that are the same however often they are sent, and to whom: at set times, with set tokens.

The next turn of a conversation has the answer to the last one in it, which the mock engine makes from the prompt alone:
it is known before anybody was asked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.kv_blocks import block_hashes
from llmops.perf.simulate.simulated_request import SimulatedRequest
from llmops.perf.workloads.filler import WORDS
from llmops.perf.workloads.lengths import Lengths, parse_lengths
from tests.support.mock_engine.repository import PLAIN

SEPARATE = "".join([f" {word}" for word in WORDS])
# what follows a prompt, without an end
Says = Callable[[Sequence[int]], Iterable[int]]


@dataclass(frozen=True)
class Asked:
    """`at`: seconds from the start; `ids` of the prompt; `answer`: how many tokens."""

    at: float
    ids: tuple[int, ...]
    answer: int
    tier: str = ""


@dataclass(frozen=True)
class Talks:
    """Conversations of `turns` turns that begin by chance, `rate` a second: the first of `apps` system prompts is the
    most frequent (Zipf). A turn comes `think` seconds (mean) after the last answer would have ended, were a token made
    every `pace` seconds."""

    rate: float
    sessions: int
    turns: int = 6
    apps: int = 8
    system: int = 600
    message: Lengths = field(default_factory=lambda: parse_lengths("uniform:90,150"))
    answer: Lengths = field(default_factory=lambda: parse_lengths("uniform:48,80"))
    think: float = 3.0
    pace: float = 0.02
    tiers: tuple[tuple[str, float], ...] = (("", 1.0),)
    seed: int = 0

    def asked(self, words: Sequence[int], says: Says | None = None) -> list[Asked]:
        """Of token ids in `words`, by the time. `says`: what the engine answers; None: the trace has answers of its
        own."""
        rng = random.Random(f"talks {self.seed}")
        apps = [rng.choices(words, k=self.system) for _ in range(self.apps)]
        popular = [1 / (rank + 1) for rank in range(self.apps)]
        found, now = [], 0.0
        for _ in range(self.sessions):
            now += rng.expovariate(self.rate)
            at, said = now, list(rng.choices(apps, popular)[0])
            tier = rng.choices(self.tiers, [share for _, share in self.tiers])[0][0]
            for _ in range(self.turns):
                said += rng.choices(words, k=self.message.draw(rng))
                answer = self.answer.draw(rng)
                found.append(Asked(at, tuple(said), answer, tier))
                own = rng.choices(words, k=answer)
                said += own if says is None else islice(says(said), answer)
                at += answer * self.pace + rng.expovariate(1 / self.think)
        return sorted(found, key=lambda one: one.at)


def words_of(engine: Path, text: str = SEPARATE) -> list[int]:
    """The tokens of `text`; those of the default are words by themselves, in any order."""
    from tokenizers import Tokenizer

    tokenizer = engine / EngineManifest.load(engine).tokenizer.directory / "tokenizer.json"
    ids: list[int] = Tokenizer.from_file(str(tokenizer)).encode(text, add_special_tokens=False).ids
    return ids


def mock_says(engine: Path) -> Says:
    """What the mock engine with a KV cache and the words of PLAIN answers."""
    from tests.support.mock_engine.llmops_engine.runtimes.script import Mixed

    return Mixed(words_of(engine, PLAIN)).after


def jobs(asked: Iterable[Asked], tokens_per_block: int, says: Says | None) -> list[SimulatedRequest]:
    """The same for the simulator: blocks by the names that engines and gateways give them."""
    return [_job(one, tokens_per_block, says) for one in asked]


def _job(one: Asked, size: int, says: Says | None) -> SimulatedRequest:
    from array import array

    answer = list(islice(says(one.ids), one.answer)) if says else []
    # the last token is said and never computed
    names = block_hashes(array("i", [*one.ids, *answer[:-1]]).tobytes(), size)
    whole = len(one.ids) // size
    return SimulatedRequest(one.at, len(one.ids), one.answer, tuple(names[:whole]), tuple(names[whole:]), tier=one.tier)


def ceiling(asked: Sequence[Asked], tokens_per_block: int, says: Says | None) -> float:
    """The share of all prompt tokens that one cache without an end would find."""
    known: set[int] = set()
    found = total = 0
    for job in jobs(asked, tokens_per_block, says):
        count = next((at for at, name in enumerate(job.hashes) if name not in known), len(job.hashes))
        known.update(job.hashes, job.after)
        found += min(count * tokens_per_block, job.tokens - 1)
        total += job.tokens
    return found / total
