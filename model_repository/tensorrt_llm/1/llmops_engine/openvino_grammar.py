"""Is a grammar one that xgrammar compiles? Asked before the request joins the batch.

GenAI compiles a grammar inside `step()`, after the forward pass: one that does not compile throws there and leaves all
other sequences of that step unusable. So each grammar first goes through a pipeline of its own, over a model of one
attention layer with the same vocabulary.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from openvino import op
from openvino import opset13 as ops

from .request import Refused

HEAD_SIZE = 32
REMEMBERED = 1000
_VOCABULARY_FILES = "openvino_*tokenizer.*"


class GrammarChecker:
    """Made on the first guided request; grammars that passed are remembered."""

    def __init__(self, model_path: Path, vocab_size: int) -> None:
        self._model_path = model_path
        self._vocab_size = vocab_size
        self._pipeline: Any = None
        self._passed: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._count = 0

    def check(self, guide: tuple[str, str], config: Any) -> None:
        """`config`: the StructuredOutputConfig made from `guide`. Raises Refused with xgrammar's reason."""
        if guide in self._passed:
            self._passed.move_to_end(guide)
            return
        reason = self._compile(config)
        if reason is not None:
            raise Refused(f"guided_decoding_guide: {reason}")
        self._passed[guide] = None
        if len(self._passed) > REMEMBERED:
            self._passed.popitem(last=False)

    def _compile(self, config: Any) -> str | None:
        """xgrammar's complaint, None if it has none."""
        if self._pipeline is None:
            self._pipeline = _make_pipeline(self._model_path, self._vocab_size)
        request = genai.GenerationConfig()
        request.max_new_tokens = 1
        request.stop_token_ids = {0}
        request.eos_token_id = 0
        request.structured_output_config = config
        self._count += 1
        handle = self._pipeline.add_request(self._count, ov.Tensor(np.zeros((1, 1), np.int64)), request)
        try:
            self._pipeline.step()
        except RuntimeError as error:
            # Whether a token can be sampled from the little model does not matter.
            return explain(str(error)) if "xgrammar" in str(error) else None
        finally:
            handle.cancel()
            self._pipeline.step()
        return None


def explain(text: str) -> str:
    """The last line of GenAI's message, without source paths and time stamps."""
    line = text.strip().splitlines()[-1]
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", line)


def _make_pipeline(model_path: Path, vocab_size: int) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = 4
    scheduler.max_num_seqs = 1
    scheduler.max_num_batched_tokens = 32
    with tempfile.TemporaryDirectory(prefix="llmops-grammar-") as name:
        folder = Path(name)
        ov.save_model(little_model(vocab_size), str(folder / "openvino_model.xml"))
        for path in model_path.glob(_VOCABULARY_FILES):
            shutil.copy(path, folder)
        return genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", {"INFERENCE_NUM_THREADS": 1})


def little_model(vocab_size: int) -> ov.Model:
    """One attention layer with a KV cache, as GenAI's change to paged attention wants to find it."""
    names = {"input_ids": "i64", "attention_mask": "i64", "position_ids": "i64"}
    ids, mask, positions = (_parameter(name, [-1, -1], kind) for name, kind in names.items())
    beam = _parameter("beam_idx", [-1], "i32")
    sinks: list[Any] = []
    where = ops.convert(ids, "f32")
    hidden = ops.unsqueeze(ops.unsqueeze(where, np.int64(1)), np.int64(3))
    hidden = ops.multiply(hidden, _ones(1, 1, 1, HEAD_SIZE))
    key, value = (_cached(hidden, ids, beam, kind, sinks) for kind in ("key", "value"))
    bias = ops.unsqueeze(ops.unsqueeze(ops.convert(mask, "f32"), np.int64(1)), np.int64(1))
    context = ops.scaled_dot_product_attention(hidden, key, value, bias)
    merged = ops.reshape(ops.transpose(context, np.array([0, 2, 1, 3])), np.array([0, 0, -1]), True)
    logits = ops.matmul(merged, _ones(vocab_size, HEAD_SIZE), False, True)
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
