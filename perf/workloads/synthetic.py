"""Workloads of random prompts of random lengths.

The workloads have single requests, shared prefixes, conversations, tools and cancellations.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Literal

from llmops.perf.records import Record, Request
from llmops.perf.workloads.base import tool_definitions
from llmops.perf.workloads.filler import Filler
from llmops.perf.workloads.lengths import Lengths

PromptForm = Literal["chat", "prompt"]


@dataclass(frozen=True)
class SyntheticSpec:
    """The properties of synthetic requests.

    Attributes:
        input: Distribution of prompt lengths in tokens, before any chat template.
        output: Distribution of answer lengths in tokens.
        turns: Distribution of the number of turns of a conversation, or None for single requests.
        prefix_tokens: Tokens of a prefix that all prompts share.
        tools: Number of tools of each request.
        cancel_share: Share of the requests that are cancelled, from 0 to 1.
        seed: Seed of the random numbers.
        form: `chat` for messages, or `prompt` for a text or token ids.
    """

    input: Lengths
    output: Lengths
    turns: Lengths | None = None
    prefix_tokens: int = 0
    tools: int = 0
    cancel_share: float = 0.0
    seed: int = 0
    form: PromptForm = "chat"


class SyntheticWorkload:
    """A workload of synthetic sessions.

    The seed and the index of a session determine its requests.
    """

    def __init__(self, shape: SyntheticSpec, filler: Filler) -> None:
        self.shape = shape
        self.filler = filler
        self.tools = tool_definitions(shape.tools) or None
        self._prefix = filler.make(random.Random(f"prefix {shape.seed} 0"), shape.prefix_tokens)

    def session(self, index: int) -> SyntheticConversation:
        rng = random.Random(f"session {self.shape.seed} {index}")
        turns = self.shape.turns.draw(rng) if self.shape.turns else 1
        return SyntheticConversation(self, rng, turns, self._prefix)


@dataclass
class SyntheticConversation:
    """A conversation of one or more turns. Each request contains all earlier messages."""

    workload: SyntheticWorkload
    rng: random.Random
    turns: int
    prefix: Any
    # The messages alternate: user, answer, user, answer and so on.
    history: list[Any] = field(default_factory=list)

    def next(self, last: Record | None) -> Request | None:
        if last is not None:
            if self.turns == 0 or not last.ok:
                return None
            self.history.append(last.ids if last.ids is not None else last.text or "")
        self.turns -= 1
        shape = self.workload.shape
        self.history.append(self.workload.filler.make(self.rng, shape.input.draw(self.rng)))
        output = shape.output.draw(self.rng)
        request = Request(max_tokens=output, tools=self.workload.tools, cancel_after=self._cancel_after(output))
        request.keep_text = self.turns > 0
        self._fill(request)
        return request

    def _cancel_after(self, output: int) -> int | None:
        # The number is drawn in every session, so that the share of cancellations does not change
        # the prompts.
        leaves, where = self.rng.random(), self.rng.random()
        return 1 + int(where * (output - 1)) if leaves < self.workload.shape.cancel_share else None

    def _fill(self, request: Request) -> None:
        if self.workload.shape.form == "prompt":
            request.prompt = self.workload.filler.join(self.prefix, *self.history)
            return
        request.messages = [{"role": "system", "content": self.prefix}] if self.prefix else []
        for index, content in enumerate(self.history):
            request.messages.append({"role": ("user", "assistant")[index % 2], "content": content})
