"""An open load of single requests, whose prompts (token ids) are the same in every run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.perf.clients.base import RequestOptions
from llmops.perf.clients.openai import OpenAIBenchClient
from llmops.perf.load.runner import Runner, StopCondition, arrival_times
from llmops.perf.records import Record, Request
from llmops.perf.workloads.base import SingleRequestSession
from llmops.perf.workloads.filler import WORDS
from llmops.perf.workloads.lengths import parse_lengths
from tests.support.mock_engine.repository import NAME

#: Number of system prompts, with which the prompts begin. Their frequencies follow Zipf's law.
APPS = 8
#: Tokens of each system prompt.
SYSTEM_TOKENS = 600
MESSAGE, ANSWER = parse_lengths("uniform:90,150"), parse_lengths("uniform:48,80")


@dataclass(frozen=True)
class OpenLoad:
    """Requests with random arrival times that do not depend on earlier answers.

    Attributes:
        words: Token ids from which the prompts are made.
        rate: Requests per second.
        seconds: Time in which the requests arrive.
        seed: Seed of the random numbers.
    """

    words: Sequence[int]
    rate: float
    seconds: float
    seed: int = 0

    def session(self, index: int) -> SingleRequestSession:
        rng = random.Random(f"{self.seed} {index}")
        (app,) = rng.choices(range(APPS), [1 / (rank + 1) for rank in range(APPS)])
        system = random.Random(f"app {app}").choices(self.words, k=SYSTEM_TOKENS)
        message = rng.choices(self.words, k=MESSAGE.draw(rng))
        return SingleRequestSession(Request(ANSWER.draw(rng), prompt=system + message))

    async def send(self, url: str, key: str | None = None) -> list[Record]:
        """Send the requests to the gateway at `url`, which ends in /v1, and return their records."""
        options = RequestOptions(api_key=key, extra={"temperature": 0})
        client = OpenAIBenchClient(url, NAME, chat=False, options=options)
        arrivals = arrival_times("poisson", self.rate, random.Random(self.seed))
        run = await Runner(client, self).open(arrivals, StopCondition(seconds=self.seconds))
        await client.close()
        return run.records


def is_in_time(record: Record, ttft: float, tpot: float) -> bool:
    """Return True if a request got its full answer and met both objectives, which are in seconds."""
    if not record.ok or record.ttft is None or record.tokens_out != record.requested:
        return False
    return record.ttft <= ttft and (record.tpot or 0.0) <= tpot


def is_rejected(record: Record) -> bool:
    return record.error is not None and record.error.startswith("http_503")


def words_of(engine: Path) -> list[int]:
    """Return the ids of tokens that are words by themselves, in any order."""
    from tokenizers import Tokenizer

    tokenizer = engine / EngineManifest.load(engine).tokenizer.directory / "tokenizer.json"
    text = "".join([f" {word}" for word in WORDS])
    ids: list[int] = Tokenizer.from_file(str(tokenizer)).encode(text, add_special_tokens=False).ids
    return ids
