"""What is asked of another replica when an answer has to go on there: pure, so that it can be held against itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmops.gateway.interfaces import EngineRequest, SamplingParams

# an odd number (2^64 divided by the golden ratio): what is drawn after a seam is drawn with another seed
_SEED_STRIDE = 0x9E3779B97F4A7C15
_SEED_COUNT = 2**64


def single_sequence_request(request: EngineRequest, sequence: int) -> EngineRequest:
    """One sequence of a request as a request of its own, which draws as it would have drawn: with seed + its number."""
    if request.n == 1:
        return request
    seed = request.sampling.seed
    sampling = request.sampling if seed is None else replace(request.sampling, seed=(seed + sequence) % _SEED_COUNT)
    return replace(request, request_id=f"{request.request_id}-{sequence}", n=1, sampling=sampling)


def has_finished(request: EngineRequest, tokens: Sequence[int]) -> bool:
    """Whether a sequence with these tokens has ended, though nobody has said so."""
    if len(tokens) >= request.max_tokens:
        return True
    if not tokens or len(tokens) < request.min_tokens:
        return False
    return tokens[-1] in request.end_ids or any(_ends_with(tokens, word) for word in request.stop_words)


def remaining_request(request: EngineRequest, tokens: Sequence[int]) -> EngineRequest:
    """The prompt and what has come of the answer as the new prompt. A drawn token is drawn with another seed, or the
    same luck would come again."""
    done = len(tokens)
    return replace(
        request,
        input_ids=[*request.input_ids, *tokens],
        max_tokens=request.max_tokens - done,
        min_tokens=max(0, request.min_tokens - done),
        sampling=_reseeded(request.sampling, done),
    )


def needs_replay(request: EngineRequest) -> bool:
    """Whether the engine keeps something of the answer that a prompt does not bring back: where in the grammar it is,
    how often a token came (repetition_penalty alone looks at the prompt as well), half a word that ends or is banned.
    """
    sampling = request.sampling
    counted = sampling.presence_penalty or sampling.frequency_penalty
    words = any(len(word) > 1 for word in (*request.stop_words, *request.bad_words))
    return request.guide is not None or bool(counted) or words


def is_deterministic(request: EngineRequest) -> bool:
    """Whether the same request gives the same tokens, as far as it is the request's to say."""
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
