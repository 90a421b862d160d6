"""Objectives of a load test as users write them, and the share of requests that met them.

Examples are `ttft:200ms`, a limit for every request, `ttft_p99:700ms` and `availability:99.9%`.
"""

import re
from collections.abc import Mapping, Sequence

from llmops.errors import InputError
from llmops.objectives import AVAILABILITY, LATENCIES, PERCENTILES, Objective, goodput_limits, parse_share
from llmops.perf.records import Record
from llmops.units import parse_duration

_EXAMPLES = "as in ttft:200ms, ttft_p99:700ms or availability:99.9%"


def parse_objective(text: str) -> Objective:
    """Return the objective that `text` describes.

    Args:
        text: `METRIC:DURATION`, `METRIC_pN:DURATION` or `availability:SHARE`.

    Raises:
        InputError: The text has none of these forms. The message has examples.
    """
    name, colon, limit = text.partition(":")
    if not colon:
        raise InputError(f"The objective {text!r} has no colon; write METRIC:DURATION, {_EXAMPLES}.")
    match = re.fullmatch(rf"({'|'.join(LATENCIES)})(?:_p(\d+))?", name)
    try:
        if name == AVAILABILITY:
            return Objective(AVAILABILITY, share=parse_share(limit))
        seconds = parse_duration(limit)
    except ValueError as error:
        raise InputError(f"The objective {text!r} is not usable: {error}, {_EXAMPLES}.") from error
    if match is None or not seconds or (match[2] and int(match[2]) not in PERCENTILES):
        raise InputError(
            f"The objective {text!r} is not usable; write one of {', '.join(LATENCIES)}, with _p50, _p95 or _p99 for a "
            f"percentile, {_EXAMPLES}."
        )
    return Objective(match[1], seconds, int(match[2]) / 100 if match[2] else None)


def meets_objectives(record: Record, slos: list[Objective]) -> bool:
    """Return True if a request succeeded and met every limit that applies to a single answer."""
    return record.ok and all(_is_met(slo, record) is not False for slo in goodput_limits(slos))


def attained_shares(records: Sequence[Record], slos: Sequence[Objective]) -> dict[str, float | None]:
    """Return the share of requests that met each objective, from 0 to 1, by the objective's text.

    All limits for single requests share one entry, which a request meets if it meets all of them. A
    request without the latency of a percentile, such as the time per token of a one-token answer,
    does not count. The share is None if no request counts.
    """
    single = [slo for slo in slos if slo.share is None]
    shares = {
        str(slo): _share([met for record in records if (met := _is_met(slo, record)) is not None])
        for slo in slos
        if slo.share is not None
    }
    if single:
        shares[", ".join(map(str, single))] = _share([meets_objectives(record, single) for record in records])
    return shares


def missed_objectives(shares: Mapping[str, float | None], slos: Sequence[Objective], share: float) -> list[str]:
    """Return a clause for each entry of `attained_shares` that too few requests met.

    Args:
        shares: The result of `attained_shares`.
        slos: The objectives of the run.
        share: The share of requests that must meet the limits for single requests.
    """
    needed = {str(slo): slo.share for slo in slos}
    missed = []
    for text, met in shares.items():
        least, asked = needed.get(text) or share, "which needs" if needed.get(text) else "and --fail-under asks for"
        if met is not None and met < least:
            missed.append(f"{100 * met:.1f} % of the requests met {text}, {asked} {100 * least:g} %")
    return missed


def _is_met(slo: Objective, record: Record) -> bool | None:
    """Return True if a request met an objective, or None if the objective does not apply."""
    if slo.metric == AVAILABILITY:
        return None if record.cancelled else record.error is None
    if not record.ok:
        return None
    value = max(record.gaps, default=None) if slo.metric == "itl" else getattr(record, slo.metric)
    return None if value is None else value <= slo.seconds


def _share(met: Sequence[bool]) -> float | None:
    return round(sum(met) / len(met), 5) if met else None
