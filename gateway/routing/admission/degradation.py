"""Degraded mode, which restricts the requests to a saturated model before it rejects any.

    NORMAL ⇄ SHORT_ANSWERS ⇄ SMALL_MODEL ⇄ SHORT_PROMPTS ⇄ SHED

The level rises when the smoothed saturation of the queue stays above the threshold of the next
level. The level falls step by step when the saturation is well below that threshold. The code is
pure: callers pass the time.
"""

from __future__ import annotations

import logging
import math
import stat
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from time import perf_counter
from typing import Any

from llmops.errors import InputError
from llmops.gateway.interfaces import DegradedLimits
from llmops.gateway.routing.admission.request_queue import DEFAULT_TIER_NAME
from llmops.gateway.settings import GatewaySettings
from llmops.gateway.telemetry import metric_definitions
from llmops.gateway.telemetry.metrics import GatewayMetrics
from llmops.output_files import check_not_put_by_another
from llmops.yaml_files import read_yaml

log = logging.getLogger(__name__)


class DegradedLevel(IntEnum):
    """The levels of degraded mode. Each level includes the restrictions of the levels below it."""

    NORMAL = 0
    SHORT_ANSWERS = 1  # answers are cut at `max_tokens`
    SMALL_MODEL = 2  # new conversations with a routed alias get the small model
    SHORT_PROMPTS = 3  # long prompts of lower tiers are rejected
    SHED = 4  # all requests of lower tiers are rejected


#: Saturation at which the next level is entered, by the current level. Requests are rejected at 1.
ENTER_SATURATION = (0.5, 0.65, 0.8, 0.9)
#: Share of the saturation at which a level was entered, below which the level is left.
LEAVE_SHARE = 0.5
#: Time constant of the smoothed saturation, in seconds. Longer than the bursts that the queue
#: absorbs.
SMOOTHING_SECONDS = 10.0
#: Minimum seconds between entering a level and the next higher level, because the effect of a level
#: takes a few answers to show.
RISE_SECONDS = 10.0
#: Minimum seconds between entering a level and the next lower level, so that a short pause of the
#: load does not end the restrictions.
FALL_SECONDS = 30.0

#: Maximum size in bytes of the file of levels, which the event loop parses in up to 60 ms. Levels
#: of a thousand models fit.
MAX_FILE_BYTES = 16 << 10


class DegradationState:
    """The current level of one model, and its smoothed saturation."""

    def __init__(self, now: float) -> None:
        self.level = DegradedLevel.NORMAL
        self.saturation = 0.0
        self._updated = now
        # a model may enter the first level at once, but must not change levels within seconds
        self._changed = -math.inf

    def update(self, saturation: float, now: float) -> DegradedLevel:
        """Return the level, after the queue had this saturation since the last call."""
        elapsed, self._updated = max(now - self._updated, 0.0), now
        self.saturation += (saturation - self.saturation) * (1 - math.exp(-elapsed / SMOOTHING_SECONDS))
        level, lasted = self.level, now - self._changed
        if lasted >= RISE_SECONDS and level < DegradedLevel.SHED and self.saturation >= ENTER_SATURATION[level]:
            self.level, self._changed = DegradedLevel(level + 1), now
        elif lasted >= FALL_SECONDS and level and self.saturation < LEAVE_SHARE * ENTER_SATURATION[level - 1]:
            self.level, self._changed = DegradedLevel(level - 1), now
        return self.level


@dataclass(frozen=True)
class DegradationRules:
    """The restrictions of each level.

    Attributes:
        max_tokens: Maximum tokens of an answer, from level 1 on.
        prompt_tokens: Maximum tokens of a prompt of a lower tier, at level 3.
        first_tier: Name of the tier that keeps its long prompts and is not shed.
    """

    max_tokens: int
    prompt_tokens: int
    first_tier: str

    def limits(self, level: DegradedLevel, tier: str) -> DegradedLimits:
        """Return the restrictions for a request of a tier, at a level above NORMAL."""
        if (tier or DEFAULT_TIER_NAME) == self.first_tier or level < DegradedLevel.SHORT_PROMPTS:
            return DegradedLimits(level, self.max_tokens)
        return DegradedLimits(level, self.max_tokens, self.prompt_tokens, level == DegradedLevel.SHED)


class LevelFile:
    """A file in which operators set the level of all models, or of some models.

    The file has a level (`2`), a mapping of models to levels (`llama: 2`), or is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._levels: dict[str, DegradedLevel] = {}

    def level(self, model: str) -> DegradedLevel | None:
        """Return the level that the file sets for a model, or None to choose it automatically."""
        found = self._levels.get(model)
        return self._levels.get("") if found is None else found

    def reload(self) -> None:
        """Read the file again if it has changed.

        A file that cannot be read is logged and sets no level.
        """
        try:
            found = self._path.stat()
            # A file that is written twice within one tick of the clock keeps its time.
            stamp, is_regular = (found.st_mtime_ns, found.st_ino, found.st_size), stat.S_ISREG(found.st_mode)
        except OSError:
            stamp, is_regular = None, False
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            # opening a pipe would block the event loop until another process writes to it
            if stamp is not None and not is_regular:
                raise ValueError("it is not a regular file")
            self._levels = self._read() if is_regular else {}
        except (InputError, OSError, ValueError) as error:
            self._levels = {}
            message = (
                "The levels of degraded mode in %s cannot be read (%s); write a number from 0 to 4, or MODEL: NUMBER."
            )
            log.error(message, self._path, str(error).rstrip("."))

    def _read(self) -> dict[str, DegradedLevel]:
        check_not_put_by_another(self._path)
        if self._path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES >> 10} KiB")
        return _parse_levels(read_yaml(self._path))


def _parse_levels(content: Any) -> dict[str, DegradedLevel]:
    named = content if isinstance(content, dict) else {} if content is None else {"": content}
    if wrong := [level for level in named.values() if level not in list(DegradedLevel)]:
        raise ValueError(f"{wrong[0]!r} is no level")
    return {str(name): DegradedLevel(level) for name, level in named.items()}


class Degradation:
    """The degraded-mode levels of a gateway's models, chosen automatically or set in the file."""

    def __init__(
        self,
        rules: DegradationRules,
        file: LevelFile | None = None,
        clock: Callable[[], float] = perf_counter,
        on_level: Callable[[str, DegradedLevel], None] = lambda model, level: None,
    ) -> None:
        """Create the levels. `on_level` is called for each new model, and when a level changes."""
        self.rules = rules
        self._file, self._clock, self._on_level = file, clock, on_level
        self._states: dict[str, DegradationState] = {}
        self._forced: set[str] = set()
        self._levels: dict[str, DegradedLevel] = {}

    def limits(self, model: str, tier: str, has_waiting: Callable[[], bool]) -> DegradedLimits | None:
        """Return the restrictions for a request of a tier, or None if nothing is restricted.

        A tenant without waiting requests is restricted like the first tier, because the fair queue
        would serve it at once. A single tenant that fills the queue would otherwise restrict all
        tenants. A level that was set in the file restricts all tenants.
        """
        level = self.level(model)
        if not level:
            return None
        is_exempt = model not in self._forced and not has_waiting()
        return self.rules.limits(level, self.rules.first_tier if is_exempt else tier)

    def level(self, model: str) -> DegradedLevel:
        """Return the current level of a model."""
        return self._levels.get(model, DegradedLevel.NORMAL)

    def update(self, saturation: dict[str, float]) -> None:
        """Update the levels from the saturation of each model's queue.

        Call several times a second.
        """
        now = self._clock()
        if self._file is not None:
            self._file.reload()
        for model, value in saturation.items():
            state = self._states.setdefault(model, DegradationState(now))
            level = state.update(value, now)
            forced = self._file.level(model) if self._file is not None else None
            level = level if forced is None else forced
            (self._forced.discard if forced is None else self._forced.add)(model)
            before = self._levels.get(model)
            if level == before:
                continue
            self._levels[model] = level
            self._on_level(model, level)
            if before is not None or level:
                reason = f"saturation {state.saturation:.2f}" if forced is None else "set by hand"
                message = "Degraded mode of model %s is now at level %d, after level %d (%s)"
                log.warning(message, model, level, before or 0, reason)


def rules_from_settings(settings: GatewaySettings) -> DegradationRules | None:
    """Return the restrictions in the settings, or None without degraded mode."""
    degraded = settings.degraded
    if degraded is None:
        return None
    return DegradationRules(degraded.max_tokens, degraded.prompt_tokens, next(iter(settings.tiers), DEFAULT_TIER_NAME))


def create_degradation(settings: GatewaySettings, metrics: GatewayMetrics) -> Degradation | None:
    """Return a gateway's degraded mode with its metric, or None without degraded mode."""
    rules = rules_from_settings(settings)
    if rules is None or settings.degraded is None:
        return None
    levels = metrics.numbers(metric_definitions.DEGRADED_LEVEL)

    def on_level(model: str, level: DegradedLevel) -> None:
        levels.labels(model).value = level

    path = settings.degraded.file
    return Degradation(rules, LevelFile(path) if path is not None else None, on_level=on_level)
