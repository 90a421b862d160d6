"""The interface of all filters, and the findings that filters return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

#: Way in which a policy treats an answer's text. `hold` releases text after it was judged, so no
#: byte of a match leaves; `cut` releases text at once and ends the answer at a finding, so at most
#: one window leaves; `observe` only counts findings.
StreamMode = Literal["hold", "cut", "observe"]

#: Category of an answer that was ended because a filter could not judge it.
UNAVAILABLE = "filter_unavailable"

#: Tenant whose text is being judged, empty without a tenant. Tenants take turns, and have separate
#: prefix caches: the text of one tenant must not be found in the cache by another.
JUDGED_TENANT: ContextVar[str] = ContextVar("judged_tenant", default="")


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of a filter in a text.

    Attributes:
        filter: The filter's name in the settings.
        category: The kind of harm found, such as `secrets` or `hate`.
        score: The filter's confidence from 0 to 1; 1 for filters without scores.
    """

    filter: str
    category: str
    score: float = 1.0


class FilterUnavailableError(Exception):
    """An error of a filter that could not judge: its model or service did not answer.

    The policy's setting `fail` determines the consequence.
    """


class TextFilter(ABC):
    """An interface to filters that judge a whole text, possibly over the network.

    Attributes:
        name: The filter's name in the settings.
        categories: All categories that the filter may find.
    """

    name: str
    categories: tuple[str, ...]

    @abstractmethod
    async def judge(self, text: str) -> Finding | None:
        """Return a finding in `text`, or None if the filter has no objection.

        Raises:
            FilterUnavailableError: The filter could not judge the text.
        """

    async def close(self) -> None:
        return
