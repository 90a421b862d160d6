"""Grammars of OpenVINO GenAI, and a pipeline that only compiles them.

GenAI compiles a grammar inside `step()`, after the forward pass, while all sequences wait. Its
compiler belongs to the tokenizer and caches what it has compiled. So another pipeline with the same
tokenizer, over a model of one attention layer, fills that cache beforehand. Its `generate()`
releases the GIL.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from openvino import op
from openvino import opset13 as ops

from ..request import check_json
from .walk_costs import WALK_TOKENS, WalkCosts, is_too_slow, summarize_walk

HEAD_SIZE = 32
#: Token id that ends a walk through a grammar, as the tokenizer's end of text does.
_END = 0
#: Logit of tokens that end a walk. At a temperature of 100, such a token is e^-100 times as likely
#: as any other token, so a walk continues as long as the grammar allows.
_UNLIKELY = -10_000.0

Guide = tuple[str, str]


def structured_output(guide: Guide) -> Any:
    """Return the StructuredOutputConfig of OpenVINO GenAI for a guide.

    Raise RequestRejectedError for a schema that is not JSON.
    """
    kind, text = guide
    config = genai.StructuredOutputConfig()
    if kind == "regex":
        config.regex = text
    elif kind == "ebnf_grammar":
        config.grammar = text
    else:
        config.json_schema = check_json(text or "{}")
    return config


class GrammarPipeline:
    """A compiler of grammars for all pipelines that share `tokenizer`. Not thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = 4
        scheduler.max_num_seqs = 1
        scheduler.max_num_batched_tokens = 32
        with tempfile.TemporaryDirectory(prefix="llmops-grammar-") as name:
            ends = {_END, tokenizer.get_eos_token_id()}
            ov.save_model(tiny_model(vocab_size, ends), f"{name}/openvino_model.xml")
            self._pipeline = genai.ContinuousBatchingPipeline(
                name, tokenizer, scheduler, "CPU", INFERENCE_NUM_THREADS=1
            )
        self._count = 0

    def compile(self, guide: Guide) -> str | None:
        """Compile a grammar without the GIL. Return xgrammar's error, or None after success."""
        try:
            self._pipeline.generate([_prompt()], [_sampling(guide, 1)])
        except RuntimeError as error:
            # whether the tiny model can sample a token does not matter
            return clean_error(str(error)) if "xgrammar" in str(error) else None
        return None

    def follow(self, guide: Guide, token_seconds: float) -> WalkCosts:
        """Walk through a compiled grammar and return its costs.

        The walk ends early if the costs far exceed the limit.

        Args:
            guide: The kind of the grammar and the grammar's text.
            token_seconds: The limit of CPU seconds per token.
        """
        self._count += 1
        handle = self._pipeline.add_request(self._count, _prompt(), _sampling(guide, WALK_TOKENS))
        costs: list[float] = []
        try:
            while self._pipeline.has_non_finished_requests():
                start = time.process_time()
                self._pipeline.step()
                costs.append(time.process_time() - start)
                if is_too_slow(costs[1:], token_seconds):
                    handle.cancel()
        except RuntimeError:
            handle.cancel()
            self._pipeline.step()
        return summarize_walk(costs)


def _prompt() -> Any:
    return ov.Tensor(np.zeros((1, 1), np.int64))


def _sampling(guide: Guide, tokens: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens = tokens
    config.stop_token_ids = {_END}
    config.eos_token_id = _END
    # sample any allowed token, so that the walk tries all of the grammar
    config.do_sample = True
    config.temperature = 100.0
    config.structured_output_config = structured_output(guide)
    return config


def clean_error(text: str) -> str:
    """Return the last line of GenAI's message, without source paths and time stamps."""
    line = text.strip().splitlines()[-1]
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", line)


def tiny_model(vocab_size: int, unlikely: Iterable[int]) -> ov.Model:
    """Build one attention layer with a KV cache, in the form that GenAI's paged attention expects.

    All tokens are equally likely except the `unlikely` tokens, which are sampled only if a grammar
    allows no other token.
    """
    names = {"input_ids": "i64", "attention_mask": "i64", "position_ids": "i64"}
    ids, mask, positions = (_parameter(name, [-1, -1], kind) for name, kind in names.items())
    beam = _parameter("beam_idx", [-1], "i32")
    sinks: list[Any] = []
    where = ops.convert(ids, "f32")
    hidden = ops.unsqueeze(ops.unsqueeze(where, np.int64(1)), np.int64(3))
    hidden = ops.multiply(hidden, _ones(1, 1, 1, HEAD_SIZE))
    key, value = (_cached(hidden, ids, beam, kind, sinks) for kind in ("key", "value"))
    attended = ops.unsqueeze(ops.unsqueeze(ops.convert(mask, "f32"), np.int64(1)), np.int64(1))
    context = ops.scaled_dot_product_attention(hidden, key, value, attended)
    merged = ops.reshape(ops.transpose(context, np.array([0, 2, 1, 3])), np.array([0, 0, -1]), True)
    bias = np.zeros((1, 1, vocab_size), np.float32)
    bias[..., [token for token in unlikely if 0 <= token < vocab_size]] = _UNLIKELY
    logits = ops.add(ops.matmul(merged, _ones(vocab_size, HEAD_SIZE), False, True), ops.constant(bias))
    logits.output(0).set_names({"logits"})
    return ov.Model([op.Result(logits.output(0))], sinks, [ids, mask, positions, beam], "grammar")


def _cached(hidden: Any, ids: Any, beam: Any, kind: str, sinks: list[Any]) -> Any:
    info = op.util.VariableInfo()
    info.data_shape = ov.PartialShape([-1, 1, -1, HEAD_SIZE])
    info.data_type = ov.Type.f32
    info.variable_id = f"past_key_values.0.{kind}present.0.{kind}"
    variable = op.util.Variable(info)
    batch = ops.gather(ops.shape_of(ids), np.array([0]), np.int64(0))
    empty = ops.broadcast(np.float32(0), ops.concat([batch, np.array([1, 0, HEAD_SIZE])], 0))
    past = ops.gather(op.read_value(empty, variable), beam, np.int64(0))
    full = ops.concat([past, hidden], 2)
    sinks.append(op.assign(full, variable))
    return full


def _parameter(name: str, shape: list[int], kind: str) -> Any:
    parameter = op.Parameter(getattr(ov.Type, kind), ov.PartialShape(shape))
    parameter.set_friendly_name(name)
    parameter.output(0).set_names({name})
    return parameter


def _ones(*shape: int) -> Any:
    return ops.constant(np.ones(shape, np.float32))
