"""The interface of a family of requests."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import httpx


@dataclass(frozen=True)
class Target:
    """The model to ask for."""

    model: str
    embedding_model: str = "minilm"


@dataclass(frozen=True)
class Case:
    """One request. `refusals`: statuses from 500 that are right for it. A subclass may send it in its own way."""

    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    refusals: frozenset[int] = frozenset()

    async def send(self, client: httpx.AsyncClient) -> httpx.Response | None:
        """The answer; None where there can be none, as when the case itself hangs up. Raises httpx.HTTPError."""
        return await client.post(self.path, content=self.body, headers=self.headers)


# endless, and the same for the same state of `Random`
Family = Callable[[Target, random.Random], Iterator[Case]]
