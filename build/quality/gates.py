"""What quantisation may cost at most; beyond it a build fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llmops.errors import BuildError, InputError


@dataclass(frozen=True)
class Quality:
    """The figures in engine.json. `golden_agreement` is the share of greedy answer tokens that stayed the same."""

    perplexity: float
    perplexity_ratio: float
    top1_agreement: float
    mean_kl: float
    worst_token_kl: float
    golden_agreement: float | None
    tokens: int
    prompts: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Gates:
    """Limits, inclusive; None leaves one out. Sound 8-bit and 4-bit models pass the defaults, broken ones do not."""

    max_ppl_ratio: float | None = 1.20
    min_top1: float | None = 0.70
    max_mean_kl: float | None = 0.30
    max_token_kl: float | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, Any], bits: int) -> Gates:
        """Defaults for 8 or 4 bits per weight, overridden by what the user gave. Raises InputError."""
        defaults = cls() if bits < 8 else cls(max_ppl_ratio=1.05, min_top1=0.80, max_mean_kl=0.10)
        given = {name: _number(name, options[name]) for name in GATES if options.get(name) is not None}
        return cls(**{**asdict(defaults), **given})

    def failures(self, quality: Quality) -> list[str]:
        """One clause per gate that is not met."""
        checks = (
            ("--max-ppl-ratio", "perplexity ratio", quality.perplexity_ratio, self.max_ppl_ratio, False),
            ("--min-top1", "top-1 agreement", quality.top1_agreement, self.min_top1, True),
            ("--max-mean-kl", "mean KL", quality.mean_kl, self.max_mean_kl, False),
            ("--max-token-kl", "worst token's KL", quality.worst_token_kl, self.max_token_kl, False),
        )
        return [
            f"{what} {value:.4g} is {'under' if least else 'over'} {limit:g} ({flag})"
            for flag, what, value, limit, least in checks
            if limit is not None and (value < limit if least else value > limit)
        ]

    def check(self, quality: Quality) -> None:
        """Raises BuildError naming every gate that is not met."""
        failures = self.failures(quality)
        if failures:
            raise BuildError(
                f"the quantised model is too far from its source: {'; '.join(failures)}. Try another --quant, more "
                "or other --calib-data, a smaller --group-size, or set the limit yourself."
            )


GATES = ("max_ppl_ratio", "min_top1", "max_mean_kl", "max_token_kl")


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InputError(f"--{name.replace('_', '-')} {value!r} is not a number.") from None
