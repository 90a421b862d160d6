"""A request in the simulation, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmops.gateway.interfaces import QueuedRequest, RoutingRequest


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """Tokens of prompt and answer; `hashes` of the prompt's whole blocks, `after` of those that its answer fills.

    Times in seconds, negative for what has not happened; `cached` tokens of the prompt were found, `refused` is the
    wait that it was told. `made` are the tokens of its answer that its client has.
    """

    arrived: float
    tokens: int
    answer: int
    hashes: Sequence[int] = ()
    after: Sequence[int] = ()
    tenant: str = ""
    tier: str = ""
    turn: int = 0
    first: float = -1.0
    end: float = -1.0
    cached: int = 0
    refused: float = -1.0
    failed: bool = False
    made: int = 0
    moves: int = 0
    replica: str = ""
    gateway: int = 0
    # while it is on a replica: blocks of its prompt that were there, its tokens that are still to be read, blocks it
    # needs, and those of them that are kept for its answer
    known: int = 0
    left: int = 0
    blocks: int = 0
    answer_blocks: int = 0
    # of the prompt, and of the answer as far as it was made elsewhere
    known_tokens: int = field(init=False, repr=False)
    ticket: QueuedRequest = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.known_tokens = self.tokens
        wanted = RoutingRequest(self.tokens, answer=self.answer, hashes=self.hashes)
        self.ticket = QueuedRequest(self.tenant, wanted, self.arrived, self.tier, payload=self)
