"""Checks of seeds, several sequences, penalties, top-k and top-p, bias, and adapters."""

from typing import Any

from llmops import contract
from llmops.perf.verify.contract.outputs import differs, refused_by_name
from llmops.perf.verify.engine_context import PLAIN, EngineContext
from llmops.perf.verify.findings import Finding, VerifyCheck, assume, check, expect, refused, unseen, works

CHECKS: list[VerifyCheck] = []
_NEW = 8
#: Inputs that the gateway sends for OpenAI's defaults, except the temperature. Some engines are
#: greedy if top_k and top_p are absent, so both are always sent, and an engine that is still greedy
#: has a fault.
_HOT: dict[str, Any] = {
    "greedy": False,
    contract.TEMPERATURE.name: 2.5,
    contract.RUNTIME_TOP_K.name: 0,
    contract.RUNTIME_TOP_P.name: 1.0,
}
#: Log-probability in nats above which the greedy token is drawn at every temperature of these
#: checks.
_CERTAIN = -1e-3
#: Log-probability that an engine sends if it did not compute the real one.
_NOT_COMPUTED = -9000.0


@check(CHECKS, "drawing")
async def drawing(engine: EngineContext) -> Finding:
    """Check that the engine draws tokens at random.

    An engine that ignores the temperature would pass all greedy checks.
    """
    scored = engine.metadata.capabilities.logprobs
    options: dict[str, Any] = {contract.RETURN_LOG_PROBS.name: True} if scored else {}
    if engine.metadata.capabilities.seed:
        result = [await engine.same(PLAIN, seed=seed, **options, **_HOT) for seed in (7, 8, 9)]
    else:
        result = [await engine.same(PLAIN, **options, **_HOT) for _ in range(3)]
    if all(one.ids == engine.plain for one in result):
        assume(scored, "no answer at temperature 2.5 differs from the greedy one, and no log-probability says why")
        plain = await engine.same(PLAIN, return_log_probs=True)
        expect(
            min(plain.scores) > _CERTAIN,
            "three answers at temperature 2.5 are the greedy one, though its tokens are not certain: the engine "
            "ignores the temperature; see docs/tensorrt-llm.md",
        )
        return unseen("the model is certain of every token of this answer")
    scores = [score for one in result for score in one.scores]
    if scored:
        expect(
            scores and max(scores) <= 1e-4, f"log-probabilities of drawn tokens are missing or above 0: {scores[:4]}…"
        )
        expect(min(scores) > _NOT_COMPUTED, "log-probabilities of drawn tokens are not computed")
        expect(any(scores), "every log-probability of drawn tokens is 0")
    return works("answers at temperature 2.5 differ from the greedy one")


@check(CHECKS, "seeds")
async def seeds(engine: EngineContext) -> Finding:
    if not engine.metadata.capabilities.seed:
        return refused_by_name(await engine.same(_NEW, seed=7, **_HOT), contract.SEED)
    first = (await engine.same(_NEW, seed=7, **_HOT)).ids
    again = (await engine.same(_NEW, seed=7, **_HOT)).ids
    expect(first == again, differs(again, first, "the same request with the same seed"))
    others = [(await engine.same(_NEW, seed=seed, **_HOT)).ids for seed in (8, 9)]
    differ = any(other != first for other in others)
    assume(differ, "three seeds gave the same tokens at temperature 2.5: this engine does not draw")
    return works()


@check(CHECKS, "cut-offs")
async def cut_offs(engine: EngineContext) -> Finding:
    temperature, top_p, min_p = contract.TEMPERATURE.name, contract.RUNTIME_TOP_P.name, contract.RUNTIME_MIN_P.name
    ways: dict[str, dict[str, Any]] = {"top_p near 0": {temperature: 1.0, top_p: 1e-6}}
    if engine.ours:
        ways["temperature 0"] = {temperature: 0.0}
    if engine.metadata.capabilities.min_p:
        ways["min_p near 1"] = {temperature: 1.0, min_p: 0.9999}
    for name, tensors in ways.items():
        found = (await engine.same(_NEW, greedy=False, **tensors)).ids
        expect(found == engine.plain[:_NEW], f"{name} is not greedy: " + differs(found, engine.plain, "top_k 1"))
    return works(", ".join(ways))


@check(CHECKS, "n sequences")
async def sequences(engine: EngineContext) -> Finding:
    announced = engine.metadata.capabilities.n > 1
    result = await engine.same(_NEW, num_return_sequences=2)
    if not announced and engine.ours:
        return refused_by_name(result, contract.NUM_RETURN_SEQUENCES)
    if not announced and result.error is not None:
        return refused()
    result.ids  # noqa: B018 - raises what the engine refused with
    for sequence in (0, 1):
        found = result.tokens.get(sequence, [])
        expect(found == engine.plain[:_NEW], f"greedy sequence {sequence}: " + differs(found, engine.plain, "n = 1"))
    if not announced:
        # NVIDIA's C++ backend supports several sequences, but the gateway requests one sequence at
        # a time from that backend.
        return works("not announced, yet each of two greedy sequences is what a request of its own gets")
    if not engine.metadata.capabilities.seed:
        return works("greedy; seeds are not announced")
    drawn = await engine.same(_NEW, num_return_sequences=2, seed=20, **_HOT)
    whole = True
    for sequence in (0, 1):
        alone = (await engine.same(_NEW, seed=20 + sequence, **_HOT)).ids
        found = drawn.tokens.get(sequence, [])
        expect(
            found[:1] == alone[:1], f"sequence {sequence} of seed 20: " + differs(found, alone, f"seed {20 + sequence}")
        )
        whole = whole and found == alone
    # The rounding of two sequences in a batch differs from a single sequence's, which can change a
    # drawn token.
    return works(
        "each is what a request of its own would get" + ("" if whole else ", until a batch's rounding differs")
    )


@check(CHECKS, "penalties")
async def penalties(engine: EngineContext) -> Finding:
    if not getattr(engine.metadata.capabilities, "penalties", True):
        return refused_by_name(await engine.same(2, frequency_penalty=1.0), contract.FREQUENCY_PENALTY)
    plain = (await engine.same(3 * _NEW, engine.loop)).ids
    repeats = len(set(plain)) <= len(plain) // 2
    assume(repeats, "the plain answer hardly repeats a token, so a penalty would not show")
    seen = []
    for tensor in (contract.FREQUENCY_PENALTY, contract.REPETITION_PENALTY, contract.PRESENCE_PENALTY):
        result = await engine.same(3 * _NEW, engine.loop, **{tensor.name: 2.0})
        fewer = len(set(result.ids)) > len(set(plain))
        # A token more than 2 nats more likely than all others stays the greedy one with a presence
        # penalty of 2.
        expect(
            fewer or tensor is contract.PRESENCE_PENALTY,
            f"{tensor} with the value 2 does not reduce repetitions in the answer",
        )
        seen += [tensor.name.removesuffix("_penalty")] if fewer else []
    return works(", ".join(seen))


@check(CHECKS, "logit bias")
async def bias(engine: EngineContext) -> Finding:
    token = next(i for i in range(3, engine.metadata.vocab_size) if i not in engine.plain)
    values = [0.0] * engine.metadata.vocab_size
    values[token] = 1000.0
    result = await engine.same(3, embedding_bias=values)
    if not engine.metadata.capabilities.logit_bias:
        return refused_by_name(result, contract.EMBEDDING_BIAS)
    expect(result.ids == [token] * 3, "a bias of 1000 on one token does not make it the answer")
    return works()


@check(CHECKS, "adapters")
async def adapters(engine: EngineContext) -> Finding:
    taken = {adapter.id for adapter in engine.metadata.adapters}
    unknown = next(i for i in range(900_001, 900_100) if i not in taken)
    result = await engine.same(3, lora_task_id=unknown)
    expect(result.error is not None, f"adapter {unknown} does not exist, yet the request was answered")
    if engine.ours:
        expect(
            str(result.error).startswith(f"{contract.LORA_TASK_ID}:"),
            f"the refusal of an unknown adapter does not name the tensor: {result.error}",
        )
    if not engine.metadata.adapters:
        return refused("no adapter is announced; an unknown adapter is refused")
    same = []
    for adapter in engine.metadata.adapters:
        found = (await engine.same(_NEW, lora_task_id=adapter.id)).ids
        expect(found, f"adapter {adapter.name} answers nothing")
        if found == engine.plain[:_NEW]:
            same.append(adapter.name)
    assume(not same, f"{', '.join(same)} answered this prompt as the base model does")
    return works(f"each of {len(engine.metadata.adapters)} adapters answers differently from the base model")
