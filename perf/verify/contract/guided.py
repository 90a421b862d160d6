"""Checks of guided decoding: announced kinds of guides work, and other kinds are rejected."""

import json
import re
from collections.abc import Callable
from typing import Any

from llmops.contract import GUIDE, GUIDE_KINDS, GUIDE_TYPE, STOP_WORDS_LIST
from llmops.perf.verify.engine_context import EngineContext
from llmops.perf.verify.findings import Finding, VerifyCheck, assume, check, expect, refused, unseen, works, wrong
from llmops.perf.verify.probe import ProbeResponse

CHECKS: list[VerifyCheck] = []
_NEW = 48
_SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "count": {"type": "integer"}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
_GUIDES: dict[str, str] = {
    "json": "",
    "json_schema": json.dumps(_SCHEMA),
    "regex": "[0-9]{4}-(red|blue)",
    "ebnf_grammar": 'root ::= ("yes" | "no") "!"',
}


def _json(text: str, ended: bool) -> bool:
    if not ended:
        return text.lstrip()[:1] in tuple('{["-0123456789tfn')
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _schema(text: str, ended: bool) -> bool:
    if not ended:
        return text.lstrip().startswith("{")
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return set(value) == {"colour", "count"} and value["colour"] in ("red", "green", "blue")


_FITS: dict[str, Callable[[str, bool], bool]] = {
    "json": _json,
    "json_schema": _schema,
    "regex": lambda text, ended: re.fullmatch(_GUIDES["regex"], text) is not None,
    "ebnf_grammar": lambda text, ended: text in ("yes!", "no!"),
}


def _guided(kind: str) -> Callable[[EngineContext], object]:
    async def run(engine: EngineContext) -> Finding:
        tensors: dict[str, Any] = {
            GUIDE_TYPE.name: kind,
            **({GUIDE.name: _GUIDES[kind]} if kind != "json" else {}),
        }
        ends = engine.metadata.end_ids or (-1,)
        if len(ends) > 1:
            # In NVIDIA's backend, an answer that continues after a complete text is an error that ends
            # all active requests. So every end token must end the answer.
            tensors[STOP_WORDS_LIST.name] = [[token] for token in ends[1:]]
        result = await engine.same(_NEW, end_id=ends[0], **tensors)
        if kind not in engine.metadata.capabilities.guided:
            return _refused(result, engine)
        if engine.tokenizer is None:
            result.ids  # noqa: B018 - raises what the engine refused with
            return unseen("the model's tokenizer cannot be read on this machine, so its answer cannot be decoded")
        ids = result.ids
        text = engine.tokenizer.decode([token for token in ids if token not in ends])
        ended = len(ids) < _NEW or not set(ends).isdisjoint(ids)
        expect(_FITS[kind](text, ended), f"the answer {text[:60]!r} does not follow the guide")
        return works(repr(text if len(text) <= 40 else text[:39] + "…"))

    return run


def _refused(result: ProbeResponse, engine: EngineContext) -> Finding:
    if result.error is None:
        return wrong("this kind is not announced, yet the request was answered: the guide was dropped")
    named = result.error.startswith(GUIDE.name)
    expect(named or not engine.ours, f"the refusal does not name the tensor: {result.error[:100]!r}")
    return refused()


for _kind in GUIDE_KINDS:
    CHECKS.append(VerifyCheck(f"guided: {_kind}", _guided(_kind)))  # type: ignore[arg-type]


@check(CHECKS, "guided: a guide that is not a grammar")
async def broken(engine: EngineContext) -> Finding:
    if "regex" not in engine.metadata.capabilities.guided:
        return refused("regex is not announced")
    # The executor of NVIDIA's backend builds the guide within a step (1.2.1,
    # cpp/tensorrt_llm/batch_manager/guidedDecoder.cpp, build).
    assume(engine.ours, "not sent: over such a guide, NVIDIA's backend ends all answers that run")
    result = await engine.same(4, guided_decoding_guide_type="regex", guided_decoding_guide="([0-9]")
    expect(result.error is not None, "a regular expression with an open bracket was accepted")
    expect(not result.tokens, "the guide was refused only after tokens had come")
    expect(
        str(result.error).startswith(f"{GUIDE}:"),
        f"the refusal does not name the tensor: {str(result.error)[:100]!r}",
    )
    return works("refused by name")
