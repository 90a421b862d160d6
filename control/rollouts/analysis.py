"""Further conditions of a roll-out: PromQL with a comparison, such as `EXPRESSION < 0.01`.

The comparison is made in this module and not in PromQL, whose result is empty both if the
comparison is false and if the series do not exist. A condition without data holds a roll-out and
never ends it.
"""

from __future__ import annotations

import asyncio
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import httpx

from llmops.errors import InputError
from llmops.fair_client import fair_client
from llmops.input_files import MALFORMED
from llmops.response_limits import BOUNDED_ASYNC, SHORT
from llmops.untrusted_text import escape_unsafe
from llmops.urls import without_secrets

#: Maximum seconds for an answer of Prometheus, because other roll-outs wait meanwhile.
TIMEOUT = 2.0

#: Seconds between two queries of a condition. Prometheus does not scrape more often.
INTERVAL = 15.0

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION = re.compile(
    r"(?P<query>.*[^<>=!\s])\s*(?P<operator><=|>=|==|!=|<|>)\s*(?:bool\s+)?(?P<limit>[-+]?(\d++\.?\d*+|\.\d++)(e[-+]?\d++)?)\s*",
    re.DOTALL | re.IGNORECASE,
)


class Condition(NamedTuple):
    """A PromQL query, and the comparison that each of its values must pass."""

    query: str
    operator: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Parse a condition. Raises InputError if `text` does not end in a comparison."""
        found = _CONDITION.fullmatch(text.strip())
        if found is None:
            raise InputError(
                f"The analysis {text!r} has no comparison with a number at its end; write for example "
                "'sum(rate(errors_total[5m])) < 0.1'."
            )
        return cls(found["query"].strip(), found["operator"], float(found["limit"]))

    def __str__(self) -> str:
        return f"{self.query} {self.operator} {self.limit:g}"


class AnalysisResult(NamedTuple):
    """The result for all conditions together and, unless they passed, the reason."""

    state: Literal["passed", "failed", "no data"]
    reason: str = ""


class Analysis:
    """The conditions of one roll-out, checked again every INTERVAL seconds.

    Args:
        prometheus: URL of Prometheus.
        conditions: The conditions, in the form that `Condition.parse` accepts.
        clock: Returns the time in seconds.
    """

    def __init__(self, prometheus: str, conditions: Sequence[str], clock: Callable[[], float]) -> None:
        self._url, self._clock = prometheus, clock
        self._conditions = [Condition.parse(text) for text in conditions]
        self._asked_at = -math.inf
        self._result = AnalysisResult("passed")

    async def check(self) -> AnalysisResult:
        """Return the result of all conditions, from Prometheus or from a recent check."""
        now = self._clock()
        if self._conditions and not 0 <= now - self._asked_at < INTERVAL:
            self._asked_at = now
            async with fair_client(base_url=self._url, timeout=TIMEOUT, **BOUNDED_ASYNC) as client:
                self._result = await check_conditions(client, self._conditions)
        return self._result


async def check_conditions(client: httpx.AsyncClient, conditions: Sequence[Condition]) -> AnalysisResult:
    """Query Prometheus for all conditions, and return their result.

    A condition that fails outweighs other conditions without data.

    Args:
        client: A client whose base URL is Prometheus.
        conditions: The conditions.
    """
    results = await asyncio.gather(*(_check(client, condition) for condition in conditions))
    found = (result for state in ("failed", "no data") for result in results if result.state == state)
    return next(found, AnalysisResult("passed"))


async def _check(client: httpx.AsyncClient, condition: Condition) -> AnalysisResult:
    try:
        async with asyncio.timeout(TIMEOUT):
            response = await client.get("/api/v1/query", params={"query": condition.query}, extensions=SHORT)
        body = response.json()
        if body["status"] != "success":
            reason = escape_unsafe(str(body.get("error", "no reason")))
            return AnalysisResult("no data", f"Prometheus rejects '{condition.query}'; correct the query: {reason}")
        data = body["data"]
        samples = [data["result"]] if data["resultType"] == "scalar" else [one["value"] for one in data["result"]]
        values = [value for _, text in samples if not math.isnan(value := float(text))]
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        place = without_secrets(str(client.base_url))
        return AnalysisResult(
            "no data", f"Prometheus at {place} does not answer ({type(error).__name__}); check that it runs."
        )
    except MALFORMED:
        place = without_secrets(str(client.base_url))
        return AnalysisResult("no data", f"{place} does not answer like Prometheus; check its URL.")
    if not values:
        return AnalysisResult("no data", f"Prometheus has no value of '{condition.query}'; check the query.")
    compare = _OPERATORS[condition.operator]
    for value in values:
        if not compare(value, condition.limit):
            return AnalysisResult("failed", f"The analysis '{condition}' does not hold: the value is {value:g}.")
    return AnalysisResult("passed")
