"""Traces of requests that are the same in every run: set times and set tokens.

The next turn of a conversation contains random tokens in place of the previous answer, so the whole
trace is known before the first request is sent.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.perf.workloads.filler import WORDS
from llmops.perf.workloads.lengths import Lengths, parse_lengths

SEPARATE = "".join([f" {word}" for word in WORDS])


@dataclass(frozen=True)
class TraceRequest:
    """A request of a trace.

    Attributes:
        at: Seconds from the start.
        ids: Token ids of the prompt.
        answer: Number of tokens to generate.
    """

    at: float
    ids: tuple[int, ...]
    answer: int
    tier: str = ""


@dataclass(frozen=True)
class Talks:
    """Conversations that begin at random, `rate` a second, with `turns` turns each.

    The first of `apps` system prompts is the most frequent (Zipf). A turn comes `think` seconds
    (mean) after the last answer would have ended, if a token took `pace` seconds.
    """

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

    def asked(self, words: Sequence[int]) -> list[TraceRequest]:
        """Return the requests of all conversations by time, of token ids in `words`."""
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
                found.append(TraceRequest(at, tuple(said), answer, tier))
                said += rng.choices(words, k=answer)
                at += answer * self.pace + rng.expovariate(1 / self.think)
        return sorted(found, key=lambda one: one.at)


def words_of(engine: Path, text: str = SEPARATE) -> list[int]:
    """Return the tokens of `text`.

    Tokens of the default text are words by themselves, in any order.
    """
    from tokenizers import Tokenizer

    tokenizer = engine / EngineManifest.load(engine).tokenizer.directory / "tokenizer.json"
    ids: list[int] = Tokenizer.from_file(str(tokenizer)).encode(text, add_special_tokens=False).ids
    return ids
