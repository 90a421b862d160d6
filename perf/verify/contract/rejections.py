"""Checks that unsupported inputs are rejected before any token, with the name of their tensor."""

from typing import Any

from llmops import contract
from llmops.contract import Tensor
from llmops.perf.verify.engine_context import EngineContext
from llmops.perf.verify.findings import Finding, VerifyCheck, check, expect, works

CHECKS: list[VerifyCheck] = []


def _cases(engine: EngineContext) -> list[tuple[Tensor, Any]]:
    """Return the (tensor, value) of each unsupported input.

    Only this project's models promise to reject the second half with the tensor's name.
    """
    too_long = engine.metadata.max_seq_len - len(engine.prompt) + 1
    common: list[tuple[Tensor, Any]] = [
        (contract.REQUEST_OUTPUT_LEN, too_long),
        (contract.REQUEST_OUTPUT_LEN, 0),
    ]
    ours: list[tuple[Tensor, Any]] = [
        (contract.INPUT_IDS, [*engine.prompt[:-1], engine.metadata.vocab_size]),
        (contract.BEAM_WIDTH, 2),
        (contract.TEMPERATURE, -1.0),
        (contract.RUNTIME_TOP_P, 1.5),
        (contract.REPETITION_PENALTY, 0.0),
        (contract.NUM_RETURN_SEQUENCES, 10_000),
        (contract.END_ID, engine.metadata.vocab_size),
        (contract.MIN_TOKENS, 5),
        (contract.RETURN_CONTEXT_LOGITS, True),
        (contract.DRAFT_ACCEPTANCE_THRESHOLD, 0.5),
    ]
    return common + ours if engine.ours else common


@check(CHECKS, "refusals by tensor name")
async def refusals(engine: EngineContext) -> Finding:
    cases = _cases(engine)
    for tensor, value in cases:
        result = await engine.same(4, **{tensor.name: value})
        said = f"{tensor} {str(value)[:20]}"
        expect(result.error is not None, f"{said} was answered instead of refused")
        expect(not result.tokens, f"{said} was refused only after tokens had come")
        if engine.ours:
            expect(
                str(result.error).startswith(f"{tensor}:"),
                f"the refusal of {said} does not name the tensor: {result.error!r}",
            )
    return works(f"{len(cases)} requests that cannot be honoured")


@check(CHECKS, "an answer after all that")
async def afterwards(engine: EngineContext) -> Finding:
    result = await engine.same(8)
    expect(result.ids == engine.plain[:8], "after refused requests the engine answers differently than before")
    return works()
