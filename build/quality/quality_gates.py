"""Quality gates: limits on the loss by quantisation, beyond which a build fails."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from llmops.build.quant_formats import FORMATS, QualityLimits
from llmops.errors import BuildError, InputError

if TYPE_CHECKING:
    from llmops.build.engine_folder.manifest import EngineManifest, QualityMetrics


@dataclass(frozen=True)
class QualityGates(QualityLimits):
    """The limits of the quality gate. A value equal to a limit passes, and None disables a limit.

    Users cannot set `max_weight_error`, beyond which the files are wrong, or `min_range`, the share
    of the evaluation texts' range that calibration must have seen in every layer. `max_token_kl`,
    the KL divergence of the worst token, has no default: correct FP8 models had 1.1 to 5.6 nats.
    """

    max_token_kl: float | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, Any], quant: str, kv_cache: str = "auto") -> QualityGates:
        """Return the default limits of a format and KV cache, overridden by the user's options.

        Raises:
            InputError: An option is not a number in range.
        """
        overrides = {name: _number(name, options[name]) for name in GATES if options.get(name) is not None}
        default = cls(**asdict(_loss(quant)))
        return replace(default if kv_cache == "auto" else _with_cache(default), **overrides)

    @classmethod
    def of_engine(cls, manifest: EngineManifest, overrides: Mapping[str, Any] | None = None) -> QualityGates:
        """Return the limits with which an engine was built, overridden by `overrides`."""
        stored = dict(manifest.quality_limits)
        stored |= {name: value for name, value in (overrides or {}).items() if value is not None}
        return cls.from_options(stored, manifest.quantisation.weights, manifest.quantisation.kv_cache)

    def check(self, quality: QualityMetrics) -> None:
        """Check metrics against the limits.

        Raises:
            BuildError: The files are wrong, or a limit is exceeded.
        """
        error = quality.weight_error
        if error is not None and self.max_weight_error is not None and error > self.max_weight_error:
            raise BuildError(
                f"The exported {quality.weight_error_at} differs by {error:.0%}, and rounding changes it by less "
                f"than {self.max_weight_error:.1%}: a fault of the export, and no loss by quantisation. Build again, "
                "and report this if it fails again."
            )
        self._check_ranges(quality)
        failures = self.failures(quality)
        if failures:
            raise BuildError(
                f"The quantised model is too far from its source: {'; '.join(failures)}. Try another --quant, more "
                "or other --calib-data, a smaller --group-size, or set the limit yourself."
            )

    def passes(self, quality: QualityMetrics) -> bool:
        """Return True if `check` raises no error."""
        try:
            self.check(quality)
        except BuildError:
            return False
        return True

    def _check_ranges(self, quality: QualityMetrics) -> None:
        if quality.narrowest is not None and quality.narrowest[0] < self.min_range:
            part, layer = quality.narrowest
            raise BuildError(
                f"The calibrated range of {layer} covers only {part:.0%} of the range in the evaluation texts, so "
                "inputs are clipped; give more --calib-data, like the texts that the model will read."
            )
        if quality.widest is not None and quality.widest[0] > WIDEST:
            times, layer = quality.widest
            raise BuildError(
                f"The calibrated range of {layer} is {times:.0f} times the range in the evaluation texts: a scale is "
                "wrong, or --calib-data has unusual texts. Calibrate with other texts."
            )

    def describe(self) -> str:
        """Return the limits in one line."""
        limits = (
            ("perplexity at most x{:g}", self.max_ppl_ratio),
            ("top-1 agreement at least {:.0%}", self.min_top1),
            ("mean KL at most {:g}", self.max_mean_kl),
            ("worst token's KL at most {:g}", self.max_token_kl),
        )
        return ", ".join(text.format(limit) for text, limit in limits if limit is not None)

    def failures(self, quality: QualityMetrics) -> list[str]:
        """Return a clause of the error message for each limit that is exceeded."""
        checks = (
            ("--max-ppl-ratio", "perplexity ratio", quality.perplexity_ratio, self.max_ppl_ratio, False),
            ("--min-top1", "top-1 agreement", quality.top1_agreement, self.min_top1, True),
            ("--max-mean-kl", "mean KL", quality.mean_kl, self.max_mean_kl, False),
            ("--max-token-kl", "worst token's KL", quality.worst_token_kl, self.max_token_kl, False),
        )
        return [
            f"{what} {value:.4g} is {'under' if is_minimum else 'over'} {limit:g} ({flag})"
            for flag, what, value, limit, is_minimum in checks
            if limit is not None and (value < limit if is_minimum else value > limit)
        ]


#: Loss that an 8-bit KV cache adds to the limits of the weights.
_CACHE = QualityGates(max_ppl_ratio=1.03, min_top1=0.95, max_mean_kl=0.03)
#: Limits for formats without limits of their own. These are formats whose weights are used
#: unchanged, and formats of other targets.
_UNKNOWN = QualityLimits(max_weight_error=0.6)
#: Maximum calibrated range, as a multiple of the range in the evaluation texts.
WIDEST = 32.0


def _loss(quant: str) -> QualityLimits:
    quant_format = FORMATS.get(quant)
    return (quant_format.loss if quant_format else None) or _UNKNOWN


def _with_cache(gates: QualityGates) -> QualityGates:
    """Return the limits, relaxed by the loss of an 8-bit KV cache. A limit of None stays None."""
    return replace(
        gates,
        max_ppl_ratio=gates.max_ppl_ratio and gates.max_ppl_ratio * (_CACHE.max_ppl_ratio or 1),
        min_top1=gates.min_top1 and gates.min_top1 * (_CACHE.min_top1 or 1),
        max_mean_kl=gates.max_mean_kl and gates.max_mean_kl + (_CACHE.max_mean_kl or 0),
    )


GATES = ("max_ppl_ratio", "min_top1", "max_mean_kl", "max_token_kl")


def user_limits(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits that the user set, in the form that `QualityGates.of_engine` reads."""
    return {name: options[name] for name in GATES if options.get(name) is not None}


def _number(name: str, value: Any) -> float:
    flag = f"--{name.replace('_', '-')}"
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InputError(f"{flag} {value!r} is not a number; give a number.") from None
    if not 0 <= number < math.inf or (name == "min_top1" and number > 1):
        raise InputError(
            f"{flag} {value} is out of range; give a number from 0{' to 1' if name == 'min_top1' else ' on'}."
        )
    return number
