"""The quality watch, which sends golden prompts to all replicas and drains corrupted replicas.

The watch runs in the gateway, because it sends requests to chosen replicas past the routing, and
because it must also work without control. Every sweep answers two questions:

- Are the answers right? Each prompt is answered once per version; the share of right answers is
  `llm_quality_score`, which alerts and the judge of a canary read.
- Are the replicas of a version equal? All replicas answer the same few prompts (with `shadow`, also
  some prompts of users). A replica that differs from the majority twice in succession is drained.
  Wrong weights, a wrong tokenizer and a broken KV cache all change the tokens.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from llmops.background import LogOnce
from llmops.gateway.errors import ApiError
from llmops.gateway.interfaces import Engine, EngineRequest, SamplingParams
from llmops.gateway.routing.quality.golden_prompts import GoldenPrompt, load_golden_prompts
from llmops.gateway.routing.replicas.pool_registry import PoolRegistry
from llmops.gateway.routing.replicas.replica import Replica
from llmops.gateway.routing.replicas.replica_pool import ReplicaPool
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.settings import QualitySettings
from llmops.gateway.telemetry import metric_definitions
from llmops.gateway.telemetry.metrics import GatewayMetrics
from llmops.sequences import common_prefix_length

log = logging.getLogger(__name__)

#: Maximum length in tokens of a user's prompt that is repeated. Longer prompts would cost every
#: replica too much.
MAX_SHADOW_TOKENS = 2048
#: Mean similarity from which two replicas count as equal. Copies of a version stay above 0.8 even
#: if different batches change roundings; corrupted replicas are below 0.3.
AGREEMENT = 0.5
#: Number of golden prompts that every replica of a version answers in a sweep. Few, because each
#: replica spends the time.
COMPARED_PROMPTS = 12
#: Maximum number of tokens in the answers that are compared. Few, because after a different rounding,
#: the answers of healthy replicas differ to their end.
COMPARED_TOKENS = 16
#: Maximum number of concurrent requests of the watch on one replica, so that users keep the other
#: slots.
CONCURRENCY = 2
#: Maximum seconds for an answer. A slower replica is not compared, because slow does not mean
#: corrupted.
ANSWER_TIMEOUT = 60.0
#: Number of leading characters of an engine's fingerprint that are used as the version of a model
#: without versions: enough to tell engines apart.
VERSION_CHARACTERS = 12

#: The answers of one replica to the same prompts, as token ids. None stands for a failed request.
Answers = Sequence[Sequence[int] | None]
#: A function that is called after a sweep with a model, a version and the score of each prompt.
ScoreCallback = Callable[[str, str, Mapping[str, float]], None]


class ShadowSample:
    """A uniform sample of the prompts since the last `take`, with `size` prompts per model."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._prompts: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        self._seen: dict[str, int] = defaultdict(int)

    def record(self, model: str, ids: bytes) -> None:
        """Record a prompt, as token ids (INT32)."""
        if not self._size or len(ids) > 4 * MAX_SHADOW_TOKENS:
            return
        self._seen[model] += 1
        at = random.randrange(self._seen[model])
        if at < self._size:
            kept = self._prompts[model]
            if len(kept) == self._size:
                kept.pop(at)
            kept.append(tuple(array("i", ids)))

    def take(self, model: str) -> Sequence[tuple[int, ...]]:
        """Return the sample of the prompts of `model`, and start the model's next sample."""
        self._seen.pop(model, None)
        return self._prompts.pop(model, [])


def similarity(one: Answers, other: Answers) -> float | None:
    """Return the mean similarity of two replicas' answers to the same prompts, from 0 to 1.

    The similarity of two answers is the share of their tokens before the first difference. Return
    None if no prompt was answered by both replicas.
    """
    shares = [_common_share(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return sum(shares) / len(shares) if shares else None


class ReplicaComparison(NamedTuple):
    """The result of a comparison of replicas.

    Attributes:
        outliers: Replicas whose answers differ from a majority.
        agreed: True if at least two replicas answered and all are equal.
    """

    outliers: Collection[str]
    agreed: bool


def compare_replicas(answers: Mapping[str, Answers], reference: Answers | None) -> ReplicaComparison:
    """Compare the answers of a version's replicas.

    Of two replicas that differ, either can be wrong. Only earlier answers can then decide.

    Args:
        answers: The answers by replica.
        reference: Earlier answers of the same version on which its replicas agreed, or None. They
            count as a further replica.
    """
    voters: dict[str | None, Answers] = {name: own for name, own in answers.items() if any(own)}
    replicas = len(voters)
    if reference is not None:
        voters[None] = reference
    agreeing = {
        name: sum((similarity(own, other) or 0.0) >= AGREEMENT for key, other in voters.items() if key != name)
        for name, own in voters.items()
    }
    majority = [name for name, count in agreeing.items() if 2 * (count + 1) > len(voters)]
    outliers = [name for name in voters if name is not None and name not in majority] if majority else []
    return ReplicaComparison(outliers, replicas > 1 and len(majority) == len(voters))


def _common_share(one: Sequence[int], other: Sequence[int]) -> float:
    longest = max(len(one), len(other))
    return common_prefix_length(one, other) / longest if longest else 1.0


class QualityWatch:
    """The watch that sends golden prompts to all replicas in sweeps."""

    def __init__(
        self,
        settings: QualitySettings,
        pools: PoolRegistry,
        metrics: GatewayMetrics,
        shadow: ShadowSample,
        on_scores: ScoreCallback | None = None,
    ) -> None:
        """Create the watch and read its prompts.

        Args:
            settings: The settings of the watch.
            pools: The replicas.
            metrics: Receives the scores.
            shadow: Prompts of users that are compared as well.
            on_scores: Called after a sweep.

        Raises:
            InputError: The file of prompts cannot be used.
        """
        self.prompts = load_golden_prompts(settings.prompts)
        self._pools, self._shadow = pools, shadow
        self._on_scores = on_scores
        self._scores = metrics.numbers(metric_definitions.QUALITY_SCORE)
        self._removed = metrics.numbers(metric_definitions.CORRUPTED_REPLICAS)
        # for each version, the answers on which its replicas agreed, by prompt
        self._references: dict[tuple[str, str], Mapping[tuple[int, ...], Sequence[int]]] = defaultdict(dict)
        self._log_once = LogOnce()

    async def sweep(self) -> None:
        """Send the golden prompts to all ready replicas, then score versions and drain outliers."""
        for pool in self._pools.pools:
            by_version: dict[str, list[Replica]] = defaultdict(list)
            for replica in pool.replicas.values():
                if replica.view.state == "ready":
                    by_version[pool.version or _fingerprint(replica)].append(replica)
            for version, replicas in by_version.items():
                await self._compare(pool.name, version, replicas)
                await self._score(pool, version, [one for one in replicas if one.view.state == "ready"])

    async def _compare(self, model: str, version: str, replicas: Sequence[Replica]) -> None:
        """Compare the replicas of a version, and take out a replica that differs in two sweeps."""
        if len(replicas) < 2:
            return
        prompts = [tuple(_input_ids(replicas[0].model, prompt)) for prompt in self.prompts[:COMPARED_PROMPTS]]
        # At most half of the prompts are users' prompts. A user may send texts on which healthy
        # replicas differ, and equal answers to the golden prompts alone then still reach AGREEMENT.
        prompts += self._shadow.take(model)[: len(prompts)]
        found = await self._ask_all(model, version, replicas, prompts)
        if found.agreed:
            self._log_once.is_new((model, version), None)
            return
        # ask again at once: a rounding that differed with the batch will not differ again
        again = await self._ask_all(model, version, replicas, prompts)
        for replica in replicas:
            if replica.replica_id in found.outliers and replica.replica_id in again.outliers:
                self._take_out(model, version, replica, len(replicas))
                # take out one replica per sweep: the next sweep checks whether the others are right
                return
        names = ", ".join(replica.replica_id for replica in replicas)
        problem = None if again.agreed or again.outliers else names
        if self._log_once.is_new((model, version), problem) and problem:
            log.error(
                "The replicas %s of %s have the same version %s and answer differently, and none of them is in a "
                "majority. Restart the replica that you trust less. With a third replica, the watch could decide.",
                *(names, model, version),
            )

    async def _ask_all(
        self, model: str, version: str, replicas: Sequence[Replica], prompts: Sequence[tuple[int, ...]]
    ) -> ReplicaComparison:
        found = await asyncio.gather(*(self._answers(replica, prompts) for replica in replicas))
        answers = {replica.replica_id: own for replica, own in zip(replicas, found, strict=True)}
        known = self._references[model, version]
        compared = compare_replicas(answers, [known.get(prompt) for prompt in prompts] if known else None)
        if compared.agreed:
            given = zip(prompts, found[0], strict=True)
            self._references[model, version] = {prompt: answer for prompt, answer in given if answer is not None}
        return compared

    async def _score(self, pool: ReplicaPool, version: str, replicas: Sequence[Replica]) -> None:
        """Score a version with the golden prompts, which are divided among its replicas."""
        if not replicas:
            return
        # A version is asked in the way that users ask it. Replicas of a model without versions may
        # differ, so each is asked.
        engines = [self._pools.engine_of(pool)] if pool.version else [replica.engine for replica in replicas]
        shares = [self.prompts[at :: len(engines)] for at in range(len(engines))]
        found = await asyncio.gather(
            *(
                self._prompt_scores(engine, replicas[0].model, share)
                for engine, share in zip(engines, shares, strict=True)
            )
        )
        scores = {name: score for some in found for name, score in some.items()}
        if scores:
            self._scores.labels(pool.name, version).value = sum(scores.values()) / len(scores)
            if self._on_scores is not None:
                self._on_scores(pool.name, version, scores)

    async def _prompt_scores(
        self, engine: Engine, model: GenerativeModel, prompts: Sequence[GoldenPrompt]
    ) -> Mapping[str, float]:
        limit, scores = asyncio.Semaphore(CONCURRENCY), {}

        async def ask(prompt: GoldenPrompt) -> None:
            async with limit:
                ids = await _generate(engine, model, _input_ids(model, prompt), prompt.max_tokens)
            score = None if ids is None else prompt.score(model.tokenizer.decode(list(ids)))
            if score is not None:
                scores[prompt.name] = score

        await asyncio.gather(*map(ask, prompts))
        return scores

    async def _answers(self, replica: Replica, prompts: Sequence[Sequence[int]]) -> Answers:
        limit = asyncio.Semaphore(CONCURRENCY)

        async def ask(ids: Sequence[int]) -> Sequence[int] | None:
            async with limit:
                return await _generate(replica.engine, replica.model, ids, COMPARED_TOKENS)

        return await asyncio.gather(*map(ask, prompts))

    def _take_out(self, model: str, version: str, replica: Replica, count: int) -> None:
        log.error(
            "Replica %s of %s is CORRUPTED: its greedy answers differ from those of the other replicas of version %s "
            "(%d compared, twice). It is drained and gets no more requests; restart it, and check its weights and its "
            "GPU.",
            *(replica.replica_id, model, version, count),
        )
        self._removed.labels(model, replica.replica_id).inc()
        replica.take_out("its answers differ from those of its version's other replicas (quality watch)")


def _fingerprint(replica: Replica) -> str:
    return replica.model.card.engine[:VERSION_CHARACTERS] or "initial"


def _input_ids(model: GenerativeModel, prompt: GoldenPrompt) -> Sequence[int]:
    if model.template is None:
        return model.tokenizer.encode(prompt.prompt)
    return model.tokenizer.encode_prompt(model.template.render([{"role": "user", "content": prompt.prompt}]))


async def _generate(engine: Engine, model: GenerativeModel, ids: Sequence[int], tokens: int) -> Sequence[int] | None:
    """Return a greedy answer as token ids, or None if the engine cannot answer now."""
    request = EngineRequest(
        f"quality-{secrets.token_hex(8)}",
        ids,
        tokens,
        SamplingParams(temperature=0),
        end_ids=model.card.end_ids,
        extras=model.extras,
    )
    answer: list[int] = []
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT):
            stream = await engine.open(request)
            try:
                async for batch in stream:
                    answer.extend(batch.tokens)
            finally:
                stream.cancel()
    except (ApiError, TimeoutError):
        return None
    return answer
