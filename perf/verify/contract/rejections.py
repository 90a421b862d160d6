"""Checks that unsupported inputs are rejected before any token, by the name of their tensor."""

from __future__ import annotations

from typing import Any

from llmops import contract
from llmops.contract import Tensor
from llmops.perf.verify.engine_context import EngineContext
from llmops.perf.verify.findings import Finding, VerifyCheck, check, expect, works

CHECKS: list[VerifyCheck] = []


def _cases(desk: EngineContext) -> list[tuple[Tensor, Any]]:
    """Return (tensor, value).

    Only this project's model promises to reject the second half by name.
    """
    too_long = desk.card.max_seq_len - len(desk.prompt) + 1
    common: list[tuple[Tensor, Any]] = [
        (contract.REQUEST_OUTPUT_LEN, too_long),
        (contract.REQUEST_OUTPUT_LEN, 0),
    ]
    ours: list[tuple[Tensor, Any]] = [
        (contract.INPUT_IDS, [*desk.prompt[:-1], desk.card.vocab_size]),
        (contract.BEAM_WIDTH, 2),
        (contract.TEMPERATURE, -1.0),
        (contract.RUNTIME_TOP_P, 1.5),
        (contract.REPETITION_PENALTY, 0.0),
        (contract.NUM_RETURN_SEQUENCES, 10_000),
        (contract.END_ID, desk.card.vocab_size),
        (contract.MIN_TOKENS, 5),
        (contract.RETURN_CONTEXT_LOGITS, True),
        (contract.DRAFT_ACCEPTANCE_THRESHOLD, 0.5),
    ]
    return common + ours if desk.ours else common


@check(CHECKS, "refusals by tensor name")
async def refusals(desk: EngineContext) -> Finding:
    cases = _cases(desk)
    for tensor, value in cases:
        heard = await desk.same(4, **{tensor.name: value})
        said = f"{tensor} {str(value)[:20]}"
        expect(heard.error is not None, f"{said} was answered instead of refused")
        expect(not heard.tokens, f"{said} was refused only after tokens had come")
        if desk.ours:
            expect(str(heard.error).startswith(f"{tensor}:"), f"{said} is refused without its name: {heard.error!r}")
    return works(f"{len(cases)} requests that cannot be honoured")


@check(CHECKS, "an answer after all that")
async def afterwards(desk: EngineContext) -> Finding:
    heard = await desk.same(8)
    expect(heard.ids == desk.plain[:8], "after refused requests the engine answers differently than before")
    return works()
