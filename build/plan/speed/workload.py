"""The workload of a deployment: lengths, rate, latency targets, prefix hits and draft tokens."""

from dataclasses import dataclass

from llmops.errors import InputError

#: Latencies that can have targets, by the names of objectives.
TARGET_LATENCIES = (
    *("ttft_p50", "ttft_p95", "ttft_p99"),
    *("tpot_p50", "tpot_p95", "tpot_p99"),
    *("e2e_p50", "e2e_p95", "e2e_p99"),
)


@dataclass(frozen=True)
class PlanWorkload:
    """The workload of a deployment, and its latency targets.

    `isl` and `osl` are the mean numbers of tokens of a prompt and an answer. `qps` is in
    requests/s, targets are in seconds, and `availability` is a share of the time. `prefix_hit` is
    the share of a prompt's tokens that the prefix cache has. `draft_tokens` is the number of draft
    tokens per step. A draft token is accepted with probability `acceptance` if all tokens before it
    were accepted.
    """

    isl: int = 1000
    osl: int = 200
    qps: float | None = None
    ttft_p50: float | None = None
    ttft_p95: float | None = None
    ttft_p99: float | None = None
    tpot_p50: float | None = None
    tpot_p95: float | None = None
    tpot_p99: float | None = None
    e2e_p50: float | None = None
    e2e_p95: float | None = None
    e2e_p99: float | None = None
    availability: float | None = None
    prefix_hit: float = 0.0
    draft_tokens: int = 0
    acceptance: float = 0.7
    chunked_prefill: bool = True

    def __post_init__(self) -> None:
        for name, value in (("isl", self.isl), ("osl", self.osl)):
            if value < 1:
                raise InputError(f"--{name} {value} is too short; give at least 1 token.")
        if not 0 <= self.prefix_hit < 1:
            raise InputError(
                f"--prefix-hit {self.prefix_hit:g} is not possible; give a share from 0 to below 1 (1 would leave no "
                "prompt to read)."
            )
        if not 0 <= self.acceptance < 1:
            raise InputError(
                f"--acceptance {self.acceptance:g} is not possible; give a probability of at least 0 and below 1."
            )
        if self.draft_tokens < 0:
            raise InputError(f"--draft-tokens {self.draft_tokens} is negative; give a number of tokens, or 0 for none.")
        if self.qps is not None and self.qps <= 0:
            raise InputError(
                f"--qps {self.qps:g} is not possible; give a rate above 0, or leave --qps out to plan for full batches."
            )

    @property
    def has_targets(self) -> bool:
        """Return True if a latency target was given."""
        return bool(self.targets)

    @property
    def targets(self) -> dict[str, float]:
        """Return the latency targets that were given, by name."""
        named = ((name, getattr(self, name)) for name in TARGET_LATENCIES)
        return {name: limit for name, limit in named if limit is not None}

    @property
    def new_tokens(self) -> int:
        """Return the mean number of prompt tokens that are not in the prefix cache."""
        return max(1, round(self.isl * (1 - self.prefix_hit)))

    @property
    def tokens_per_step(self) -> float:
        """Return the mean number of tokens that a sequence gains per decode step.

        A sequence gains one token, and the draft tokens that are accepted.
        """
        if not self.draft_tokens:
            return 1.0
        return (1 - self.acceptance ** (self.draft_tokens + 1)) / (1 - self.acceptance)

    @property
    def length(self) -> int:
        """Return the mean number of tokens of prompt and answer together."""
        return self.isl + self.osl
