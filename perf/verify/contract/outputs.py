"""Checks of output tensors, streamed deltas, final flags, counts and log-probabilities."""

from llmops import contract
from llmops.contract import ENGINE_INPUTS, ENGINE_OUTPUTS, PYTHON_ENGINE_INPUTS, PYTHON_ENGINE_OUTPUTS, Tensor
from llmops.perf.verify.engine_context import PLAIN, EngineContext
from llmops.perf.verify.findings import Finding, VerifyCheck, assume, check, expect, refused, works, wrong
from llmops.perf.verify.probe import ProbeResponse
from llmops.sequences import common_prefix_length

CHECKS: list[VerifyCheck] = []
#: Tolerance in nats between two computations of a log-probability. Kernels for prompts and for
#: single tokens round differently, most of all with 8 bits.
LOG_PROB_TOLERANCE = 0.25
_NEW = 12


@check(CHECKS, "input and output tensors")
async def tensors(engine: EngineContext) -> Finding:
    config = engine.probe.config
    wanted = (PYTHON_ENGINE_INPUTS, PYTHON_ENGINE_OUTPUTS) if engine.ours else (ENGINE_INPUTS, ENGINE_OUTPUTS)
    for kind, table, found in zip(
        ("input", "output"), wanted, (engine.probe.inputs, engine.probe.outputs), strict=True
    ):
        for tensor in table:
            expect(tensor.name in found, f"the configuration has no {kind} {tensor.name}")
            expect(
                found[tensor.name] == tensor.datatype,
                f"{kind} {tensor.name} is {found[tensor.name]} instead of {tensor.datatype}",
            )
    expect(config.model_transaction_policy.decoupled, "the model is not decoupled, so that nothing can be streamed")
    expect(config.max_batch_size > 0, "max_batch_size is 0: tensors would have no batch dimension")
    return works(f"{len(wanted[0])} inputs and {len(wanted[1])} outputs declared as the contract says")


@check(CHECKS, "streamed deltas and the final flag")
async def deltas(engine: EngineContext) -> Finding:
    result = await engine.same(_NEW)
    expect(
        result.ids[: len(engine.prompt)] != engine.prompt or result.ids == engine.plain[:_NEW], "the prompt is echoed"
    )
    expect(len(result.ids) == _NEW, f"{_NEW} tokens were requested, but {len(result.ids)} came")
    expect(result.ids == engine.plain[:_NEW], differs(result.ids, engine.plain, "the same greedy request"))
    expect(len(result.sizes) > 1, "all tokens came in one response although streaming was asked for")
    expect(None not in result.lengths, "the responses have no sequence_length")
    _final(result)
    return works(f"{_NEW} tokens in {len(result.sizes)} responses")


@check(CHECKS, "one response without streaming")
async def whole(engine: EngineContext) -> Finding:
    result = await engine.same(_NEW, streaming=False)
    expect(result.ids == engine.plain[:_NEW], differs(result.ids, engine.plain, "the streamed request"))
    expect(
        len([size for size in result.sizes if size]) == 1,
        f"the answer came in {len(result.sizes)} responses instead of one",
    )
    _final(result)
    return works()


def _final(result: ProbeResponse) -> None:
    expect(result.finals == 1, f"the final flag came {result.finals} times instead of once")
    expect(result.after_final == 0, "responses came after the final flag")


@check(CHECKS, "token counts")
async def counts(engine: EngineContext) -> Finding:
    result = await engine.same(5, return_num_input_tokens=True, return_num_output_tokens=True)
    expect(len(result.ids) == 5, f"5 tokens were requested, but {len(result.ids)} came")
    for name, value in ((contract.NUM_INPUT_TOKENS.name, len(engine.prompt)), (contract.NUM_OUTPUT_TOKENS.name, 5)):
        found = result.others.get(name)
        assume(found or engine.ours, f"this engine does not return {name}")
        expect(found and found[0] == value, f"{name} is {found} instead of {value}")
    return works()


@check(CHECKS, "log-probabilities")
async def log_probs(engine: EngineContext) -> Finding:
    result = await engine.same(_NEW, return_log_probs=True)
    if not engine.metadata.capabilities.logprobs:
        return refused_by_name(result, contract.RETURN_LOG_PROBS)
    tokens, scores = result.ids, result.scores
    expect(len(scores) == len(tokens), f"{len(scores)} log-probabilities came for {len(tokens)} tokens")
    expect(all(score <= 1e-4 for score in scores), f"a log-probability is {max(scores):.3f}, above 0")
    total = result.cum_log_probs.get(0)
    expect(
        total is None or abs(total - sum(scores)) <= 0.01 + 0.01 * abs(sum(scores)),
        f"cum_log_probs is {total}, but the tokens' log-probabilities add up to {sum(scores):.4f}",
    )
    return await _second_request(engine, tokens, scores)


async def _second_request(engine: EngineContext, tokens: list[int], scores: list[float]) -> Finding:
    """Compare log-probabilities with those from separate requests, one request per position.

    Each position is the first token of its request.
    """
    worst = 0.0
    for at in (1, 4, 9):
        again = await engine.same(1, [*engine.prompt, *tokens[:at]], return_log_probs=True)
        # If two tokens are almost equally likely, the second request may choose the other one, and
        # then there is nothing to compare.
        if again.ids == tokens[at : at + 1]:
            worst = max(worst, abs(again.scores[0] - scores[at]))
    if worst > LOG_PROB_TOLERANCE:
        return wrong(
            f"a token's log-probability is {worst:.2f} nats off the same token's in a separate request", nats=worst
        )
    return works(f"within {worst:.4f} nats of a second request", nats=worst)


@check(CHECKS, "the same request gives the same tokens")
async def repeatable(engine: EngineContext) -> Finding:
    result = await engine.same(PLAIN)
    expect(result.ids == engine.plain, differs(result.ids, engine.plain, "the same greedy request before"))
    return works()


def differs(found: list[int], expected: list[int], other: str) -> str:
    return f"the tokens differ from those of {other} at position {common_prefix_length(found, expected)}"


def refused_by_name(result: ProbeResponse, tensor: Tensor) -> Finding:
    """Check that an unannounced output is rejected with the tensor's name, before any token."""
    if result.error is None:
        return wrong(f"{tensor} is not announced, yet the request was answered without it")
    expect(not result.tokens, f"{tensor} was refused only after {len(result.tokens.get(0, []))} tokens")
    if not result.error.startswith(f"{tensor}:"):
        return wrong(f"the refusal of {tensor} does not name the tensor: {result.error[:100]!r}")
    return refused()
