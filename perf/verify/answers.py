"""Checks that a served model answers like its checkpoint: tokenizer, chat template and weights."""

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

from tritonclient.grpc import service_pb2

from llmops import contract
from llmops.build.checkpoint.chat_template import fixed_date
from llmops.build.engine_folder.manifest import EngineManifest, Golden, GoldenAnswer
from llmops.build.quality.quality_gates import QualityGates
from llmops.build.quant_formats import FORMATS
from llmops.contract import POSTPROCESSING_SUFFIX, PREPROCESSING_SUFFIX
from llmops.errors import LlmopsError
from llmops.gateway.text.chat_template import ChatTemplate
from llmops.gateway.text.tokenizer import TextTokenizer
from llmops.gateway.triton.engine_observer import decode_strings
from llmops.gateway.triton.request_writer import MessageTensorWriter
from llmops.perf.verify.engine_context import EngineContext
from llmops.perf.verify.findings import Finding, UnseenError, VerifyCheck, check, expect, unseen, works, wrong
from llmops.sequences import common_prefix_length

CHECKS: list[VerifyCheck] = []
_AT_ONCE = 8
#: Share of equal tokens below which the served model has other weights, and not only rounded ones.
_NOTHING = 0.25
_NO_GOLDEN = (
    "engine.json has no golden answers: the engine was built by an older llmops, without its quality gate, or not by "
    "llmops; build the engine again to check its answers"
)


def golden_of(manifest: EngineManifest | None, missing: str = _NO_GOLDEN) -> tuple[EngineManifest, Golden]:
    """Return a manifest and its golden answers.

    Raise UnseenError with `missing` if there are none.
    """
    if manifest is None or manifest.golden is None:
        raise UnseenError(missing)
    return manifest, manifest.golden


@check(CHECKS, "tokenizer")
async def tokenizer(engine: EngineContext) -> Finding:
    _, golden = golden_of(engine.manifest)
    if engine.tokenizer is not None:
        _same_ids(golden, engine.tokenizer, f"the tokenizer in {engine.metadata.tokenizer_dir}")
    options = await _preprocessing(engine, golden)
    return works(f"{len(golden.answers)} prompts have the source's token ids" + options)


def _same_ids(golden: Golden, tokenizer: TextTokenizer, what: str) -> None:
    for one in golden.answers:
        found = tokenizer.encode(one.text)
        expect(found == one.text_ids, _other_ids(what, one.text, found, one.text_ids))


def _other_ids(what: str, text: str, found: list[int], expected: list[int]) -> str:
    at = common_prefix_length(found, expected)
    return (
        f"{what} makes other token ids of {text[:40]!r} than the source's (from position {at} on): it belongs to "
        "another model; build the engine again, or point tokenizer_dir to its own tokenizer folder"
    )


async def _preprocessing(engine: EngineContext, golden: Golden) -> str:
    """Check the ensemble's tokenizer, whose files may differ from the engine's.

    Return a clause for the finding, or an empty text if there is no ensemble.
    """
    model = f"{engine.metadata.name}{PREPROCESSING_SUFFIX}"
    if not await engine.probe.client.model_ready(model):
        return ""
    for one in golden.answers:
        message = service_pb2.ModelInferRequest(model_name=model)
        tensors = MessageTensorWriter(message)
        tensors.text(contract.PRE_QUERY, one.text)
        tensors.scalar(contract.PRE_REQUEST_OUTPUT_LEN, 1)
        response = await engine.probe.client.infer(message)
        raw = dict(zip((out.name for out in response.outputs), response.raw_output_contents, strict=False))
        found = list(memoryview(raw[contract.PRE_OUT_IDS.name]).cast("i"))
        expect(found == one.text_ids, _other_ids(f"the ensemble's model {model}", one.text, found, one.text_ids))
    return ", also in the ensemble"


@check(CHECKS, "text of an answer")
async def text(engine: EngineContext) -> Finding:
    (_, golden), model = golden_of(engine.manifest), f"{engine.metadata.name}{POSTPROCESSING_SUFFIX}"
    if engine.tokenizer is None or not await engine.probe.client.model_ready(model):
        return unseen("the ensemble is missing, or the tokenizer cannot be read on this machine")
    for one in golden.answers:
        message = service_pb2.ModelInferRequest(model_name=model)
        ids = [token for token in one.tokens if token not in engine.metadata.end_ids]
        tensors = MessageTensorWriter(message)
        tensors.add(contract.POST_TOKENS, (1, 1, len(ids)), b"".join(i.to_bytes(4, "little") for i in ids))
        tensors.add(contract.POST_LENGTH, (1, 1), len(ids).to_bytes(4, "little"))
        response = await engine.probe.client.infer(message)
        found = next(decode_strings(response.raw_output_contents[0]), "")
        expect(
            found == engine.tokenizer.decode(ids),
            f"the ensemble turns an answer's tokens into {found[:40]!r}; make the repository again",
        )
    return works("the ensemble's text is the tokenizer's")


@check(CHECKS, "chat template")
async def chat_template(engine: EngineContext) -> Finding:
    _, golden = golden_of(engine.manifest)
    if engine.tokenizer is None:
        return unseen(f"the tokenizer folder {engine.metadata.tokenizer_dir} cannot be read on this machine")
    source = engine.tokenizer.chat_template
    templated = any(one.ids != one.text_ids for one in golden.answers)
    if source is None:
        expect(
            not templated,
            f"{engine.metadata.tokenizer_dir} has no chat template, but the source checkpoint has one; "
            "build the engine again",
        )
        return works("neither the model nor its source has a chat template")
    try:
        template = ChatTemplate(source, engine.tokenizer.special_tokens)
    except LlmopsError as error:
        return wrong(f"{error.message} ({engine.metadata.tokenizer_dir})")
    for one in golden.answers:
        try:
            rendered = template.render([{"role": "user", "content": one.text}], variables=fixed_date())
        except LlmopsError as error:
            return wrong(
                f"{error.message} The template in {engine.metadata.tokenizer_dir} differs from the source's; "
                "build the engine again"
            )
        found = engine.tokenizer.encode_prompt(rendered)
        expect(
            found == one.ids,
            f"the chat template makes another prompt of {one.text[:40]!r} than the source's "
            f"({len(found)} tokens instead of {len(one.ids)}): {engine.metadata.tokenizer_dir} holds another model's "
            "template; build the engine again",
        )
    return works(f"{len(golden.answers)} chats are rendered as the source's template does")


_NORMALISED = (
    "every log-probability is 0: the engine normalises over the one chosen token; build with --set "
    "serve.normalize_log_probs=false, and make the repository again"
)


@dataclass
class Agreement:
    """The agreement of an engine with the source's answers, over all positions.

    Each token is requested after the source's own tokens.

    Attributes:
        same: Number of positions with the source's token.
        total: Number of positions.
        off: Differences of the log-probabilities in nats, where both chose the same token.
        scored: The engine's log-probabilities.
    """

    same: int = 0
    total: int = 0
    off: list[float] = field(default_factory=list)
    scored: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.same / self.total if self.total else 1.0

    @property
    def mean_off(self) -> float:
        return sum(self.off) / len(self.off) if self.off else 0.0


@check(CHECKS, "greedy answers")
async def greedy(engine: EngineContext) -> Finding:
    manifest, golden = golden_of(engine.manifest)
    found = await agreement(engine, golden)
    least, most = limits(manifest, found.total)
    built = _measured(manifest)
    figures = {
        "agreement": found.share,
        "agreement_when_built": 1.0 if built is None else built,
        "log_prob_difference": found.mean_off,
    }
    what = f"{found.share:.1%} of {found.total} tokens are the source's"
    if found.share < least:
        return wrong(f"{what}, but {least:.1%} must be for {_format(manifest)}: {_suspects(found.share)}", **figures)
    if found.scored and not any(found.scored):
        return wrong(_NORMALISED, **figures)
    if found.mean_off > most:
        return wrong(
            f"log-probabilities are {found.mean_off:.3f} nats off the source's on average, but at most {most:.3f} are "
            f"allowed for {_format(manifest)}: {_suspects(found.share)}",
            **figures,
        )
    detail = f"{what} (at least {least:.1%})"
    if found.off:
        detail += f", log-probabilities {found.mean_off:.4f} nats off (at most {most:.3f})"
    return works(f"{detail}; source: {golden.source}", **figures)


def _suspects(share: float) -> str:
    if share < _NOTHING:
        return (
            "other weights than the source's, swapped rank files, a wrong scale or rotary base; build the engine again"
        )
    return (
        "more than rounding costs, as a wrong scale or KV-cache type does; compare `llmops eval` of this engine, and "
        "if that is within its limits, the runtime is at fault"
    )


def _format(manifest: EngineManifest) -> str:
    weights = manifest.quantisation.weights
    return "unquantised weights" if weights == "none" else weights


def _alike(weights: str) -> str:
    """Return the format with known limits whose rounding is most like the format `weights`."""
    form = FORMATS.get(weights)
    return (form.equivalent_rounding if form else "") or "int4_wo"


def limits(manifest: EngineManifest, tokens: int) -> tuple[float, float]:
    """Return the lowest acceptable agreement and the highest mean difference of log-probabilities.

    Both are limits of the build's quality gate, widened by the random variation of `tokens`
    tokens. If the build measured the agreement of its own weights, that figure minus its variation
    is a limit too.
    """
    gates = QualityGates.of_engine(manifest)
    if gates.min_top1 is None or gates.max_mean_kl is None:
        gates = QualityGates.from_options({}, _alike(manifest.quantisation.weights))
    assert gates.min_top1 is not None
    assert gates.max_mean_kl is not None
    least = gates.min_top1 - 2 * _scatter(gates.min_top1, tokens)
    measured = _measured(manifest)
    if measured is not None:
        least = max(least, measured - 3 * _scatter(measured, tokens) - 0.02)
    # The limit is twice Pinsker's bound on the difference that a divergence can cause.
    return least, 2 * math.sqrt(2 * gates.max_mean_kl)


def _measured(manifest: EngineManifest) -> float | None:
    """Return the agreement that the build measured, or None without a measurement."""
    return manifest.quality.golden_agreement if manifest.quality is not None else None


def _scatter(share: float, tokens: int) -> float:
    return math.sqrt(max(share * (1 - share), 0.01) / max(1, tokens))


async def agreement(engine: EngineContext, golden: Golden) -> Agreement:
    """Compare all golden answers, several at a time."""
    found, slots = Agreement(), asyncio.Semaphore(_AT_ONCE)

    async def one(answer: GoldenAnswer) -> None:
        async with slots:
            await _follow(engine, answer, found)

    await asyncio.gather(*(one(answer) for answer in golden.answers))
    return found


async def _follow(engine: EngineContext, answer: GoldenAnswer, found: Agreement) -> None:
    """Compare the engine's answer with one golden answer, and add the result to `found`.

    After a different token, the engine continues with the source's token.
    """
    at, scored = 0, engine.metadata.capabilities.logprobs
    options: dict[str, Any] = {contract.RETURN_LOG_PROBS.name: True} if scored else {}
    while at < len(answer.tokens):
        result = await engine.probe.ask([*answer.ids, *answer.tokens[:at]], len(answer.tokens) - at, **options)
        expect(result.ids, "the engine ended a golden answer without a token")
        padded: list[float | None] = [*result.scores, *[None] * (len(result.ids) - len(result.scores))]
        for token, score in zip(result.ids, padded, strict=False):
            found.total += 1
            at += 1
            if token != answer.tokens[at - 1]:
                break
            found.same += 1
            if score is not None:
                found.scored.append(score)
                found.off.append(abs(score - answer.log_probs[at - 1]))
