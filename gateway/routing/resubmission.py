"""Requests that continue an answer on another replica.

The code is pure: it uses neither a clock nor I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmops.gateway.interfaces import EngineRequest, SamplingParams

#: Increase of the seed per known token, so that later tokens are drawn with another seed: 2^64
#: divided by the golden ratio.
_SEED_STRIDE = 0x9E3779B97F4A7C15
_SEED_COUNT = 2**64


def single_sequence_request(request: EngineRequest, sequence: int) -> EngineRequest:
    """Return a request for one sequence of a request.

    The new request has the seed that the engine would have used for the sequence.
    """
    if request.n == 1:
        return request
    seed = request.sampling.seed
    sampling = request.sampling if seed is None else replace(request.sampling, seed=(seed + sequence) % _SEED_COUNT)
    return replace(request, request_id=f"{request.request_id}-{sequence}", n=1, sampling=sampling)


def has_finished(request: EngineRequest, tokens: Sequence[int]) -> bool:
    """Return True if a sequence with these tokens has ended, even without the engine's report."""
    if len(tokens) >= request.max_tokens:
        return True
    if not tokens or len(tokens) < request.min_tokens:
        return False
    return tokens[-1] in request.end_ids or any(_ends_with(tokens, word) for word in request.stop_words)


def remaining_request(request: EngineRequest, tokens: Sequence[int]) -> EngineRequest:
    """Return the request for the rest of an answer.

    The prompt of the new request is the old prompt and the known tokens. A seed is changed, because
    the same seed would draw the same random numbers again.
    """
    done = len(tokens)
    return replace(
        request,
        input_ids=[*request.input_ids, *tokens],
        max_tokens=request.max_tokens - done,
        min_tokens=max(0, request.min_tokens - done),
        prompt_logprobs=None,
        sampling=_reseeded(request.sampling, done),
    )


def needs_replay(request: EngineRequest) -> bool:
    """Return True if the engine has state that a longer prompt does not restore.

    A longer prompt does not restore the state of a grammar, the counts of output tokens (only
    repetition_penalty counts the prompt too), and the beginning of a stop word or banned word of
    several tokens.
    """
    sampling = request.sampling
    counted = sampling.presence_penalty or sampling.frequency_penalty
    words = any(len(word) > 1 for word in (*request.stop_words, *request.bad_words))
    return request.guide is not None or bool(counted) or words


def is_deterministic(request: EngineRequest) -> bool:
    """Return True if the same request always gives the same tokens.

    Even then, the other requests in the engine's batch may change the tokens.
    """
    return is_greedy(request) or request.sampling.seed is not None


def is_greedy(request: EngineRequest) -> bool:
    return request.sampling.temperature == 0 or request.sampling.top_k == 1


def _reseeded(sampling: SamplingParams, done: int) -> SamplingParams:
    return (
        sampling
        if sampling.seed is None
        else replace(sampling, seed=(sampling.seed + done * _SEED_STRIDE) % _SEED_COUNT)
    )


def _ends_with(tokens: Sequence[int], word: Sequence[int]) -> bool:
    return len(word) <= len(tokens) and list(tokens[len(tokens) - len(word) :]) == list(word)
