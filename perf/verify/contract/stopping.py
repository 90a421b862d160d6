"""Checks of what ends an answer: length, end id, stop words, bad words, min_tokens."""

from __future__ import annotations

from typing import Any

from llmops.contract import BAD_WORDS_LIST, STOP_WORDS_LIST
from llmops.perf.verify.contract.outputs import refused_by_name
from llmops.perf.verify.engine_context import PLAIN, EngineContext
from llmops.perf.verify.findings import Finding, VerifyCheck, check, expect, unseen, works

CHECKS: list[VerifyCheck] = []
NO_PLACE = "the model's greedy answer says the same token over and over, so nothing can end it in the middle"


@check(CHECKS, "end id")
async def end_id(desk: EngineContext) -> Finding:
    at = desk.place()
    if at is None:
        return unseen(NO_PLACE)
    heard = await desk.same(PLAIN, end_id=desk.plain[at])
    _ended(heard.ids, desk.plain, at, 1, "the end id")
    expect(heard.finals == 1, "an ended answer has no final flag")
    return works(f"the answer is given {'with' if len(heard.ids) > at else 'without'} it")


@check(CHECKS, "stop words")
async def stop_words(desk: EngineContext) -> Finding:
    at = desk.place()
    if at is None:
        return unseen(NO_PLACE)
    for word in (desk.plain[at : at + 1], desk.plain[at : at + 2]):
        heard = await desk.same(PLAIN, stop_words_list=[[desk.card.vocab_size - 1], word])
        first = _first(desk.plain, word)
        _ended(heard.ids, desk.plain, first, len(word), f"a stop word of {len(word)} tokens")
        expect(heard.finals == 1, "an answer that a stop word ended has no final flag")
    return works("of one and of two tokens")


def _first(tokens: list[int], word: list[int]) -> int:
    return next(i for i in range(len(tokens)) if tokens[i : i + len(word)] == word)


def _ended(found: list[int], plain: list[int], at: int, length: int, what: str) -> None:
    """Return the tokens up to the stop, including any part of what stopped the answer."""
    expect(len(found) < len(plain), f"{what} at position {at} did not end the answer")
    expect(
        at <= len(found) <= at + length and found == plain[: len(found)],
        f"{what} at position {at} ended the answer after {len(found)} tokens",
    )


@check(CHECKS, "min_tokens")
async def min_tokens(desk: EngineContext) -> Finding:
    at = desk.place()
    if at is None:
        return unseen(NO_PLACE)
    least = at + 4
    heard = await desk.same(PLAIN, end_id=desk.plain[at], min_tokens=least)
    expect(len(heard.ids) >= least, f"min_tokens {least} was asked for, the answer ended after {len(heard.ids)} tokens")
    # a second end token is sent as the gateway does: as a stop word, or to NVIDIA's backend as a
    # bad word
    never = next(token for token in range(desk.card.vocab_size - 1, 0, -1) if token not in desk.plain)
    second: dict[str, Any] = {STOP_WORDS_LIST.name if desk.ours else BAD_WORDS_LIST.name: [[desk.plain[at]]]}
    heard = await desk.same(PLAIN, end_id=never, min_tokens=least, **second)
    expect(
        len(heard.ids) >= least,
        f"min_tokens {least} holds for the first end token only: a second one ended the answer after {len(heard.ids)}",
    )
    return works("for the first end token and for others")


@check(CHECKS, "bad words")
async def bad_words(desk: EngineContext) -> Finding:
    word = desk.plain[1:2]
    heard = await desk.same(PLAIN, bad_words_list=[word])
    if not desk.card.capabilities.bad_words:
        return refused_by_name(heard, BAD_WORDS_LIST)
    expect(word[0] not in heard.ids, "a bad word is in the answer")
    return works()
