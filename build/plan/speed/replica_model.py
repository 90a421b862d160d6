"""The model of a replica in steady state.

The model computes rate, latency and throughput for a number of sequences in flight.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from llmops.build.plan.speed.step_time import Prefill, StepModel
from llmops.build.plan.speed.workload import PlanWorkload

#: 95th percentile of a normal distribution, in standard deviations above the mean.
Z95 = 1.645
#: 99th percentile of a normal distribution, in standard deviations above the mean.
Z99 = 2.326
#: 95th percentile of an exponential distribution, in standard deviations above zero.
TAIL95 = math.log(20)
#: 99th percentile of an exponential distribution, in standard deviations above zero.
TAIL99 = math.log(100)
#: Maximum share of a step's tokens that steady traffic may use. Above this share, the queue of
#: prompts grows steeply.
PROMPT_LOAD = 0.85


@dataclass(frozen=True)
class OperatingPoint:
    """The rate and latency of one replica in steady state.

    `concurrency` is the mean number of decoding sequences, and `rate` is in requests/s. Times are
    in seconds: time to first token (TTFT), time per output token (TPOT), and `pause`, the longest
    time between two tokens while the engine reads a prompt or a chunk of a prompt. `prefill_share`
    is the share of the time spent on prompts.
    """

    concurrency: float
    rate: float
    ttft: float
    ttft_p95: float
    tpot: float
    tpot_p95: float
    prefill_share: float
    tokens_per_second: float
    gpus: int
    pause: float = 0.0
    ttft_p99: float = 0.0
    tpot_p99: float = 0.0

    @property
    def ttft_p50(self) -> float:
        """Return the mean TTFT, which stands for the median: the skewed median is hardly larger."""
        return self.ttft

    @property
    def tpot_p50(self) -> float:
        return self.tpot

    @property
    def e2e_p50(self) -> float:
        """Return the median time to the last token of an answer of mean length, in seconds."""
        return self._end_to_end(self.ttft, self.tpot)

    @property
    def e2e_p95(self) -> float:
        """Return the 95th percentile of the time to the last token, in seconds.

        TTFT and TPOT are assumed to be high together.
        """
        return self._end_to_end(self.ttft_p95, self.tpot_p95)

    @property
    def e2e_p99(self) -> float:
        """Return the 99th percentile of the time to the last token, in seconds."""
        return self._end_to_end(self.ttft_p99, self.tpot_p99)

    def _end_to_end(self, ttft: float, tpot: float) -> float:
        return ttft + tpot * (self.tokens_per_second / self.rate - 1)

    @property
    def per_gpu(self) -> float:
        """Return the output tokens/s per GPU."""
        return self.tokens_per_second / self.gpus

    @property
    def per_user(self) -> float:
        """Return the output tokens/s of one request."""
        return 1 / self.tpot


class ReplicaModel:
    """A replica with in-flight batching.

    Each step adds a token to every running sequence and reads new prompts. `max_batch` is the
    number of sequences that fit, and `max_num_tokens` the maximum number of tokens in a step.
    Requests arrive at random (Poisson).
    """

    def __init__(
        self, steps: StepModel, workload: PlanWorkload, max_batch: int, max_num_tokens: int, prompts: bool = True
    ) -> None:
        self.steps, self.workload = steps, workload
        self.max_batch, self.max_num_tokens = max_batch, max_num_tokens
        # In disaggregated serving, a decode worker reads no prompts.
        self.reads_prompts = prompts

    @property
    def full_batch(self) -> float:
        """Return the largest batch that memory and the token limit of a step allow."""
        return max(1.0, min(self.max_batch, self._token_limit))

    @property
    def steady_batch(self) -> float:
        """Return the largest mean batch under random arrivals.

        The peaks of this batch (95th percentile) still fit, and prompts find enough room in a step
        not to wait for long.
        """
        root = (-Z95 + math.sqrt(Z95 * Z95 + 4 * self.max_batch)) / 2
        return max(1.0, min(root * root, PROMPT_LOAD * self._token_limit))

    @property
    def _token_limit(self) -> float:
        """Return the number of sequences whose tokens fill a step.

        The tokens of prompts that replace finished sequences are included.
        """
        return self.max_num_tokens / (1 + self.workload.draft_tokens + self._prompt_tokens_per_sequence)

    @property
    def _prompt_tokens_per_sequence(self) -> float:
        """Return the prompt tokens that a step reads per running sequence.

        With this number, as many sequences arrive as finish.
        """
        if not self.reads_prompts:
            return 0.0
        return self.workload.tokens_per_step * self.workload.new_tokens / self.workload.osl

    def at(self, concurrency: float, bursts: bool = True) -> OperatingPoint:
        """Return the operating point with a mean of `concurrency` sequences in flight.

        With `bursts`, the percentiles include random changes of the number of sequences.
        """
        load, pp = self.workload, self.steps.layout.pp
        mean, plain = self._cycle(concurrency)
        burst, highest = self._bursts(concurrency, mean) if bursts else (concurrency, concurrency)
        tpot_p95 = self._cycle(burst)[0] / load.tokens_per_step
        tpot_p99 = max(tpot_p95, self._cycle(highest)[0] / load.tokens_per_step)
        rate = concurrency * load.tokens_per_step / (load.osl * mean)
        ttft, ttft_p95, ttft_p99 = self._first_token(concurrency, rate, mean, plain)
        return OperatingPoint(
            concurrency=concurrency,
            rate=rate,
            ttft=ttft,
            ttft_p95=ttft_p95,
            ttft_p99=ttft_p99,
            tpot=mean / load.tokens_per_step,
            tpot_p95=tpot_p95,
            tpot_p99=tpot_p99,
            prefill_share=1 - plain / mean,
            tokens_per_second=rate * load.osl,
            gpus=self.steps.layout.tp * pp,
            pause=self._pause(concurrency),
        )

    def _pause(self, concurrency: float) -> float:
        """Return the seconds of a step that reads a whole prompt, or the largest chunk that fits."""
        load, pp = self.workload, self.steps.layout.pp
        batch = max(1, round(concurrency / pp))
        room = max(1, self.max_num_tokens - batch * (1 + load.draft_tokens))
        tokens = min(load.new_tokens, room) if load.chunked_prefill else load.new_tokens
        prefill = Prefill(1, tokens, load.isl - load.new_tokens) if self.reads_prompts else None
        return pp * self.steps.seconds(batch, load.isl + load.osl // 2, prefill, load.draft_tokens)

    def _cycle(self, concurrency: float) -> tuple[float, float]:
        """Return the mean seconds between two tokens of a sequence, with and without prompts.

        With pipeline stages, the batch is divided into one micro-batch per stage. The micro-batches
        pass through the stages one after the other.
        """
        load, pp = self.workload, self.steps.layout.pp
        batch = max(1, round(concurrency / pp))
        admitted = concurrency / pp * self._prompt_tokens_per_sequence / load.new_tokens
        length = load.isl + load.osl // 2
        plain = self.steps.seconds(batch, length, None, load.draft_tokens)
        # With fewer than one prompt per step on average, some steps read one prompt and others
        # none.
        prompts = max(1, round(admitted))
        return pp * (plain + self._added(batch, length, prompts, plain) * admitted / prompts), pp * plain

    def _added(self, batch: int, length: int, prompts: int, plain: float) -> float:
        """Return the seconds that `prompts` prompts add to a step of `plain` seconds.

        The step decodes `batch` sequences of `length` tokens. The result is at least zero. Measured
        tables hold points that do not depend on each other, so a step with prompts could otherwise
        be shorter than the same step without prompts. Zero itself is possible: a step that waits
        for weights has time for the arithmetic of a short prompt.
        """
        mixed = self.steps.seconds(batch, length, self._prompts(prompts), self.workload.draft_tokens)
        return max(0.0, mixed - plain)

    def _bursts(self, concurrency: float, cycle: float) -> tuple[float, float]:
        """Return the 95th and 99th percentile of the number of sequences in flight.

        Random arrivals make the variance equal to the mean. A fuller batch is slower and therefore
        grows, which multiplies the variance by 1 / (1 - elasticity of the cycle).
        """
        elasticity = min(0.8, (self._cycle(1.25 * concurrency + 1)[0] / cycle - 1) / (0.25 + 1 / concurrency))
        deviation = math.sqrt(concurrency / (1 - max(0.0, elasticity)))
        return min(self.full_batch, concurrency + Z95 * deviation), min(self.full_batch, concurrency + Z99 * deviation)

    def _prompts(self, count: int) -> Prefill:
        return Prefill(count, self.workload.new_tokens, self.workload.isl - self.workload.new_tokens)

    def _first_token(self, concurrency: float, rate: float, cycle: float, plain: float) -> tuple[float, float, float]:
        """Return mean, 95th and 99th percentile of the TTFT in seconds.

        `concurrency` sequences are in flight, and `rate` requests arrive per second. `cycle` and
        `plain` are the results of `_cycle`. A request waits for the end of the running
        step, which is more likely a long step than a short step. Then the request's prompt passes
        through all stages, together with the other prompts that arrived. If a step has no room, the
        prompt also waits for the steps before. Prompts arrive at random, so the length of a step
        varies with their number.
        """
        load, pp = self.workload, self.steps.layout.pp
        batch = max(1, round(concurrency / pp))
        length = load.isl + load.osl // 2
        step = cycle / pp
        prompt = self._added(batch, length, 1, plain / pp)
        share = min(0.95, rate * prompt)
        variance = prompt**2 * rate * step / (1 - share**2)
        biased = step + variance / step
        others = rate * biased
        queue, passes = self._queue(concurrency, plain / pp + prompt)
        mean = biased / 2 + plain + pp * prompt * (1 + others)
        spread = math.sqrt(biased**2 / 12 + variance / 3 + (pp * prompt) ** 2 * others)
        high, highest = (mean + tail * spread + passes + tail * queue for tail in (TAIL95, TAIL99))
        return mean + queue + passes, high, highest

    def _queue(self, concurrency: float, step: float) -> tuple[float, float]:
        """Return two parts of the TTFT in seconds: the mean wait for room, and the first steps.

        The first steps are the steps that a long prompt takes before its last step. `step` is the
        duration of a step in seconds. The queue has as many servers as prompts fit into a step, and
        a constant service time of one step (Sakasegawa's formula). A prompt that is longer than the
        room in a step takes several steps.
        """
        load, pp = self.workload, self.steps.layout.pp
        room = max(1.0, self.max_num_tokens - concurrency / pp * (1 + load.draft_tokens))
        servers = max(1.0, room // load.new_tokens)
        busy = min(0.99, concurrency / pp * self._prompt_tokens_per_sequence / room)
        wait = busy ** (math.sqrt(2 * (servers + 1)) - 1) / (servers * (1 - busy)) * step / 2
        passes = (math.ceil(load.new_tokens / room) - 1) * step
        return wait, passes


def highest_point(
    point_at: Callable[[float], OperatingPoint], top: float, holds: Callable[[OperatingPoint], bool]
) -> OperatingPoint | None:
    """Return the operating point with the highest concurrency that `holds` accepts, or None.

    The concurrency is at most `top`. The result is None if `holds` rejects even one sequence.
    """
    best = point_at(1.0)
    if not holds(best):
        return None
    last = point_at(top)
    if holds(last):
        return last
    low, high = 1.0, top
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        point = point_at(middle)
        if holds(point):
            low, best = middle, point
        else:
            high = middle
    return best
