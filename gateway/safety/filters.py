"""The interface of all filters, and the findings that they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

#: The treatment of an answer's text by a policy. `hold` releases text after it was judged, so no
#: byte of a match leaves; `cut` releases at once and ends the answer, so at most one window leaves;
#: `observe` only counts.
StreamMode = Literal["hold", "cut", "observe"]

#: The category of an answer that ended because a filter could not judge it.
UNAVAILABLE = "filter_unavailable"


@dataclass(frozen=True, slots=True)
class Finding:
    """A filter's finding in a text.

    Attributes:
        filter: The filter's name in the settings.
        category: What was found, such as `secrets` or `hate`.
        score: From 0 to 1; 1 for filters that only say yes or no.
    """

    filter: str
    category: str
    score: float = 1.0


class FilterUnavailableError(Exception):
    """A filter could not judge: its model or service did not answer.

    The policy's `fail` decides what follows.
    """


class TextFilter(ABC):
    """A filter that is asked about a whole text, possibly over the network.

    Attributes:
        name: The filter's name in the settings.
        categories: All categories that it may find.
    """

    name: str
    categories: tuple[str, ...]

    @abstractmethod
    async def judge(self, text: str) -> Finding | None:
        """Return what is wrong with `text`, or None. Raises FilterUnavailableError."""

    async def close(self) -> None:
        return
