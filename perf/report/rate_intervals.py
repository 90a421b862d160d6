"""95 % confidence intervals of the rates of a run."""

import math
import statistics

from llmops.perf.report.document import Document

WINDOWS = 10
# Quantile of Student's t distribution for two-sided 95 %, with WINDOWS - 1 degrees of freedom.
_T = 2.262
#: Minimum mean number of events per window. The count of fewer events is mostly chance.
MIN_COUNT = 5
Interval = tuple[float, float]


def rate_interval(document: Document, name: str) -> Interval | None:
    """Return the confidence interval of a rate of the summary, or None if the run is too short.

    Args:
        document: The document of the run.
        name: The name of the rate in the summary.
    """
    if name == "goodput_per_second":
        return _goodput(document)
    events = _tokens(document) if name == "output_tokens_per_second" else _ends(document)
    return _batch_means(events, document.summary.seconds, document.summary.completed)


def _batch_means(events: list[tuple[float, float]], seconds: float, completed: int) -> Interval | None:
    """Return the confidence interval of a rate by the method of batch means.

    The run is divided into windows, and the variation of their rates gives the error of the mean.
    Return None for too few completed requests.
    """
    if completed < WINDOWS * MIN_COUNT:
        return None
    width, sums = seconds / WINDOWS, [0.0] * WINDOWS
    for when, weight in events:
        sums[min(WINDOWS - 1, max(0, int(when / width)))] += weight
    rates = [total / width for total in sums]
    spread = _T * statistics.stdev(rates) / math.sqrt(WINDOWS)
    return statistics.fmean(rates) - spread, statistics.fmean(rates) + spread


def _ends(document: Document) -> list[tuple[float, float]]:
    return [(record["end"], 1.0) for record in document.records if record["error"] is None and not record["cancelled"]]


def _tokens(document: Document) -> list[tuple[float, float]]:
    found = []
    for record in document.records:
        share = record["tokens_out"] / max(1, len(record["chunks"]))
        found += [(when, share) for when in record["chunks"]]
    return found


def _goodput(document: Document) -> Interval | None:
    """Return the confidence interval of the goodput rate.

    The result is Wilson's interval of the goodput share, multiplied by the run's request rate.
    Return None for too few requests.
    """
    summary = document.summary
    count = summary.requests - summary.cancelled
    if summary.goodput_share is None or count < WINDOWS * MIN_COUNT:
        return None
    z, share, rate = 1.96, summary.goodput_share, count / summary.seconds
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return rate * (centre - spread), rate * (centre + spread)
