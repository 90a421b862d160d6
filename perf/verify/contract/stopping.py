"""Checks of everything that ends an answer: length, end id, stop words, bad words and min_tokens."""

from typing import Any

from llmops.contract import BAD_WORDS_LIST, STOP_WORDS_LIST
from llmops.perf.verify.contract.outputs import refused_by_name
from llmops.perf.verify.engine_context import PLAIN, EngineContext
from llmops.perf.verify.findings import Finding, VerifyCheck, check, expect, works

CHECKS: list[VerifyCheck] = []


@check(CHECKS, "end id")
async def end_id(engine: EngineContext) -> Finding:
    at = engine.place()
    result = await engine.same(PLAIN, end_id=engine.plain[at])
    _ended(result.ids, engine.plain, at, 1, "the end id")
    expect(result.finals == 1, "an ended answer has no final flag")
    return works(f"the answer is returned {'with' if len(result.ids) > at else 'without'} the end id")


@check(CHECKS, "stop words")
async def stop_words(engine: EngineContext) -> Finding:
    at = engine.place()
    for word in (engine.plain[at : at + 1], engine.plain[at : at + 2]):
        result = await engine.same(PLAIN, stop_words_list=[[engine.metadata.vocab_size - 1], word])
        first = _first(engine.plain, word)
        _ended(result.ids, engine.plain, first, len(word), f"a stop word of {len(word)} tokens")
        expect(result.finals == 1, "an answer that a stop word ended has no final flag")
    return works("stop words of one and of two tokens end the answer")


def _first(tokens: list[int], word: list[int]) -> int:
    return next(i for i in range(len(tokens)) if tokens[i : i + len(word)] == word)


def _ended(found: list[int], plain: list[int], at: int, length: int, what: str) -> None:
    """Check that a stop ended an answer: `found` is the beginning of `plain` up to the stop.

    Args:
        found: The tokens of the answer.
        plain: The tokens of the same answer without a stop.
        at: The index in `plain` at which the stop begins.
        length: The number of tokens of the stop, which the answer may include.
        what: The name of the stop for the error message.

    Raises:
        WrongError: The answer did not end at the stop.
    """
    expect(len(found) < len(plain), f"{what} at position {at} did not end the answer")
    expect(
        at <= len(found) <= at + length and found == plain[: len(found)],
        f"{what} at position {at} ended the answer after {len(found)} tokens",
    )


@check(CHECKS, "min_tokens")
async def min_tokens(engine: EngineContext) -> Finding:
    at = engine.place()
    least = at + 4
    result = await engine.same(PLAIN, end_id=engine.plain[at], min_tokens=least)
    expect(len(result.ids) >= least, f"min_tokens was {least}, but the answer ended after {len(result.ids)} tokens")
    # A second end token is sent as the gateway sends it: as a stop word, or as a bad word to
    # NVIDIA's backend.
    never = next(token for token in range(engine.metadata.vocab_size - 1, 0, -1) if token not in engine.plain)
    second: dict[str, Any] = {STOP_WORDS_LIST.name if engine.ours else BAD_WORDS_LIST.name: [[engine.plain[at]]]}
    result = await engine.same(PLAIN, end_id=never, min_tokens=least, **second)
    expect(
        len(result.ids) >= least,
        f"min_tokens {least} holds for the first end token only: another end token ended the answer after "
        f"{len(result.ids)} tokens",
    )
    return works("for the first end token and for others")


@check(CHECKS, "bad words")
async def bad_words(engine: EngineContext) -> Finding:
    word = engine.plain[1:2]
    result = await engine.same(PLAIN, bad_words_list=[word])
    if not engine.metadata.capabilities.bad_words:
        return refused_by_name(result, BAD_WORDS_LIST)
    expect(word[0] not in result.ids, "a bad word is in the answer")
    return works()
