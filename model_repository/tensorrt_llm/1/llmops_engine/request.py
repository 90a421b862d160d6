"""One generation request as every runtime takes it, and the refusal that goes back to the client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llmops_contract import Tensor


class RequestRejectedError(Exception):
    """The request cannot be honoured; the text starts with the name of the tensor: `embedding_bias: not supported`."""


@dataclass
class RuntimeSamplingParams:
    """Greedy when `temperature` is 0 or `top_k` is 1. Neutral values mean: not asked for."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


@dataclass
class RuntimeRequest:
    """`input_ids` INT64 [n]. `end_ids`: tokens that end it, empty to go on past the end of text.

    `stop_words`: sequences of token ids that end it. `guide`: (json | json_schema | regex | ebnf_grammar, text).
    """

    input_ids: np.ndarray
    max_new_tokens: int
    end_ids: frozenset[int] = frozenset()
    stop_words: list[list[int]] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    # FP32 [vocabulary], added to the logits
    embedding_bias: np.ndarray | None = None
    min_tokens: int = 0
    num_sequences: int = 1
    sampling: RuntimeSamplingParams = field(default_factory=RuntimeSamplingParams)
    log_probs: bool = False
    # the most likely tokens to report at each place
    top_log_probs: int = 0
    guide: tuple[str, str] | None = None
    # who asks, so that callers can take turns: `a/b` is `b` among those of `a`
    caller: str = ""
    # prefixes are shared only by requests with the same one
    cache_salt: int = 0
    # LoRA adapter by its task id; 0 is the base model
    adapter: int = 0
    streaming: bool = False
    # what goes back besides the tokens
    context_ids: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    # every input of the contract that is one number, at its default where it was not sent
    scalars: Mapping[str, Any] = field(default_factory=dict)

    def value(self, tensor: Tensor) -> Any:
        """The value of an input that has no field here."""
        return self.scalars.get(tensor.name, tensor.default)
