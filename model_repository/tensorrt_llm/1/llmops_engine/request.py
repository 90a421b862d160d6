"""The generation request that all runtimes take, and the error that rejects a request."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import llmops_contract as contract
import numpy as np


class RequestRejectedError(Exception):
    """An error for a request that the engine rejects.

    The message starts with the tensor's name: `embedding_bias: not supported`.
    """


@dataclass
class RuntimeSamplingParams:
    """Sampling parameters, whose defaults change nothing.

    Sampling is greedy if `temperature` is 0 or `top_k` is 1.
    """

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
        """Return True if the most likely token is always taken."""
        return self.temperature == 0 or self.top_k == 1


@dataclass
class RuntimeRequest:
    """A generation request.

    Attributes:
        input_ids: The prompt, INT64 [n].
        max_new_tokens: The maximum number of new tokens per sequence.
        end_ids: Token ids that end a sequence. Without any, a sequence continues past the end of
            text.
        stop_words: Sequences of token ids that end a sequence.
        bad_words: Sequences of token ids that must not appear.
        embedding_bias: Values that are added to the logits, FP32 [vocabulary], or None.
        min_tokens: Minimum number of new tokens. Earlier end tokens and stop words have no effect.
        num_sequences: The number of independent answers to the prompt.
        sampling: The sampling parameters.
        log_probs: Return the log-probability of each token.
        top_log_probs: The number of most likely tokens to report for each new token.
        prompt_log_probs: The number of most likely tokens to report for each prompt token; -1 turns
            the report off.
        guide: The kind of the grammar (the contract's GUIDE_KINDS) and the grammar's text.
        caller: The name under which the request's grammar queues for compilation. Callers take
            turns; `a/b` takes turns as `b` within the turns of `a`.
        cache_salt: A number that separates caches: only requests with equal salts share cached
            prefixes.
        adapter: The task id of the LoRA adapter; 0 is the base model.
        streaming: Send a response per step instead of one per sequence.
        context_ids: Return the tokens before the new ones, and whether the sequence has finished.
        num_input_tokens: Return the number of prompt tokens.
        num_output_tokens: Return the number of new tokens.
    """

    input_ids: np.ndarray
    max_new_tokens: int
    end_ids: frozenset[int] = frozenset()
    stop_words: list[list[int]] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    embedding_bias: np.ndarray | None = None
    min_tokens: int = 0
    num_sequences: int = 1
    sampling: RuntimeSamplingParams = field(default_factory=RuntimeSamplingParams)
    log_probs: bool = False
    top_log_probs: int = 0
    prompt_log_probs: int = -1
    guide: tuple[str, str] | None = None
    caller: str = ""
    cache_salt: int = 0
    adapter: int = 0
    streaming: bool = False
    context_ids: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False


def check_json(guide: str) -> str:
    """Return the text of a guide. Raise RequestRejectedError if the text is not JSON."""
    try:
        json.loads(guide)
    except (ValueError, RecursionError) as error:
        raise RequestRejectedError(f"{contract.GUIDE}: is not JSON ({error})") from None
    return guide
