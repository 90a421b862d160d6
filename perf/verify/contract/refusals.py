"""What cannot be honoured is refused before any token, by the name of its tensor."""

from __future__ import annotations

from typing import Any

from llmops.perf.verify.base import Check, Finding, check, expect, works
from llmops.perf.verify.desk import Desk

CHECKS: list[Check] = []


def _cases(desk: Desk) -> list[tuple[str, dict[str, Any]]]:
    """(tensor, what to send). The second half only our own model promises to refuse by name."""
    too_long = desk.card.max_seq_len - len(desk.prompt) + 1
    common: list[tuple[str, dict[str, Any]]] = [
        ("request_output_len", {"request_output_len": too_long}),
        ("request_output_len", {"request_output_len": 0}),
    ]
    ours: list[tuple[str, dict[str, Any]]] = [
        ("input_ids", {"input_ids": [*desk.prompt[:-1], desk.card.vocab_size]}),
        ("beam_width", {"beam_width": 2}),
        ("temperature", {"temperature": -1.0}),
        ("runtime_top_p", {"runtime_top_p": 1.5}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("num_return_sequences", {"num_return_sequences": 10_000}),
        ("end_id", {"end_id": desk.card.vocab_size}),
        ("min_tokens", {"min_tokens": 5}),
        ("return_context_logits", {"return_context_logits": True}),
        ("draft_acceptance_threshold", {"draft_acceptance_threshold": 0.5}),
    ]
    return common + ours if desk.ours else common


@check(CHECKS, "refusals by tensor name")
async def refusals(desk: Desk) -> Finding:
    cases = _cases(desk)
    for name, tensors in cases:
        heard = await desk.same(4, **tensors)
        said = ", ".join(f"{key} {str(value)[:20]}" for key, value in tensors.items())
        expect(heard.error is not None, f"{said} was answered instead of refused")
        expect(not heard.tokens, f"{said} was refused only after tokens had come")
        if desk.ours:
            expect(str(heard.error).startswith(f"{name}:"), f"{said} is refused without its name: {heard.error!r}")
    return works(f"{len(cases)} requests that cannot be honoured")


@check(CHECKS, "an answer after all that")
async def afterwards(desk: Desk) -> Finding:
    heard = await desk.same(8)
    expect(heard.ids == desk.plain[:8], "after refused requests the engine answers differently than before")
    return works()
