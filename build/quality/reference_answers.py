"""Record the answers of the source model to the evaluation texts on disk.

The source model can then be removed from memory before the export is loaded.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmops.build.checkpoint import Checkpoint
from llmops.build.checkpoint.golden_prompts import (
    TOKENS,
    GoldenPrompt,
    golden_prompts,
    golden_record,
    golden_texts,
    truncate_at_end,
)
from llmops.build.engine_folder.manifest import Golden
from llmops.build.environment import installed_version
from llmops.build.progress import Progress, SilentProgress
from llmops.build.quality.layerwise_model import LayerwiseModel
from llmops.build.quality.measures import input_ranges, sketch, sketch_table
from llmops.build.quantize.calibration import EVALUATION_LENGTH, bundled_texts
from llmops.build.quantize.forward_progress import forward_cost, layer_progress
from llmops.build.quantize.model_loading import load_model, load_tokenizer, release_memory, silence_libraries


def greedy_decode(
    model: Any, device: torch.device, prompts: list[list[int]], count: int, end: set[int]
) -> tuple[list[list[int]], list[list[float]]]:
    """Return up to `count` greedy tokens per prompt, and their log-probabilities.

    All prompts run as one batch, because each step reads all weights once. The row of an answer
    that the model ends early, with a token of `end`, has fewer tokens; its log-probabilities may go
    on.
    """
    longest, pad = max(map(len, prompts)), min(end, default=0)
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=sorted(end) or None,
            pad_token_id=pad, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    scores = torch.stack([torch.log_softmax(step.float(), -1).amax(-1) for step in output.logits], 1).tolist()
    return [truncate_at_end(row, end) for row in output.sequences[:, longest:].tolist()], scores


def evaluation_ids(tokenizer: Any) -> list[list[int]]:
    """Return the bundled evaluation texts as at most 256 token ids each."""
    texts = bundled_texts("evaluation")
    encoded = (tokenizer(text, truncation=True, max_length=EVALUATION_LENGTH)["input_ids"] for text in texts)
    return [list(ids) for ids in encoded if len(ids) > 1]


def reference_work(texts: list[list[int]], prompts: list[list[int]]) -> int:
    """Return the progress total of `ReferenceAnswers.record`.

    Texts run one by one. Prompts run as one batch, and then token by token.
    """
    batch = len(prompts) * max(map(len, prompts), default=0)
    return forward_cost([len(ids) for ids in texts] + [batch] + [len(prompts)] * (TOKENS - 1))


class SketchCollector:
    """A collector of weight sketches, called while a layer of the model is in memory."""

    def __init__(self, model: LayerwiseModel) -> None:
        self.config = model.module.config
        self.found = {name: sketch_table(table) for name, table in model.tables.items()}
        self.add(model.outer)

    def add(self, parameters: Mapping[str, Tensor]) -> None:
        self.found |= sketch(parameters, self.config)


class ReferenceAnswers:
    """The recorded answers of the source model in `folder`.

    The files are reference.json (token ids, golden answers), logprobs-N.npy per text, and weight
    sketches and input ranges in safetensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        content = json.loads((folder / "reference.json").read_text())
        self.texts: list[list[int]] = content["texts"]
        self.prompts: list[list[int]] = content["prompts"]
        self.answers: list[list[int]] = content["answers"]
        self.end: set[int] = set(content["end"])
        self.golden = _golden(content)
        self.sketches: dict[str, Tensor] = load_file(folder / "sketches.safetensors")
        self.ranges: dict[str, Tensor] = load_file(folder / "ranges.safetensors")

    @property
    def answered(self) -> list[list[int]]:
        """Return the token ids of each prompt, followed by its answer."""
        return [[*prompt, *answer] for prompt, answer in zip(self.prompts, self.answers, strict=True)]

    def forward_cost(self) -> int:
        """Return the progress total of a comparison with these answers.

        Texts, and prompts with their answers, run one by one.
        """
        return forward_cost([len(ids) for ids in [*self.texts, *self.answered]])

    def log_probs(self) -> Iterator[Tensor]:
        """Yield the log-probabilities of each text."""
        for number in range(len(self.texts)):
            yield torch.from_numpy(np.load(self.folder / f"logprobs-{number}.npy"))

    @classmethod
    def record(
        cls,
        source: LayerwiseModel,
        checkpoint: Checkpoint,
        tokenizer_dir: Path,
        folder: Path,
        progress: Progress | None = None,
    ) -> Self:
        """Run the source model over all texts and prompts, and store its answers in `folder`.

        `tokenizer_dir` has the tokenizer files of the engine.
        """
        folder.mkdir(parents=True, exist_ok=True)
        progress, module, end = progress or SilentProgress(), source.module, set(checkpoint.special_tokens.end)
        texts = evaluation_ids(load_tokenizer(checkpoint, tokenizer_dir))
        golden = golden_prompts(tokenizer_dir, checkpoint.architecture.max_position_embeddings, progress.note)
        prompts = [prompt.ids for prompt in golden]
        sketches = SketchCollector(source)
        with (
            progress.stage("Recording the source", reference_work(texts, prompts)), silence_libraries(),
            layer_progress(module, progress),
        ):  # fmt: skip
            with input_ranges(module) as ranges:
                for number, log_probs in enumerate(source.log_probs(texts, sketches.add)):
                    np.save(folder / f"logprobs-{number}.npy", log_probs.numpy())
            with source.generating():
                answers, scores = greedy_decode(module, source.device, prompts, TOKENS, end) if prompts else ([], [])
        content = {
            "texts": texts, "prompts": prompts, "answers": answers, "scores": scores, "end": sorted(end),
            "plain": [prompt.text_ids for prompt in golden], "dtype": "float32",
        }  # fmt: skip
        save_file(sketches.found, folder / "sketches.safetensors")
        save_file(ranges, folder / "ranges.safetensors")
        (folder / "reference.json").write_text(json.dumps(content))
        return cls(folder)


def _golden(content: dict[str, Any]) -> Golden | None:
    """Return the golden answers in the form of engine.json."""
    if not content["prompts"]:
        return None
    rows = zip(golden_texts(), content["prompts"], content["plain"], strict=True)
    prompts = [GoldenPrompt(*row) for row in rows]
    return golden_record(_source(content["dtype"]), prompts, content["answers"], content["scores"])


def golden_agreement(candidates: Iterable[Tensor], reference: ReferenceAnswers) -> float | None:
    """Return the share of the source's answer tokens that a model also prefers, teacher-forced.

    `candidates` are the model's log-probabilities of `reference.answered`.
    """
    same = total = 0
    for log_probs, prompt, answer in zip(candidates, reference.prompts, reference.answers, strict=True):
        predicted = log_probs.argmax(-1)[len(prompt) - 1 :]
        same += int((predicted == torch.tensor(answer)).sum())
        total += len(answer)
    return same / total if total else None


def golden_of_checkpoint(checkpoint: Checkpoint, tokenizer_dir: Path, progress: Progress) -> Golden | None:
    """Return a checkpoint's golden answers through transformers, for builds without a quality gate.

    The result is None if there are no golden prompts.

    The function needs torch and transformers, and memory for the unquantised model.
    """
    prompts = golden_prompts(tokenizer_dir, checkpoint.architecture.max_position_embeddings, progress.note)
    if not prompts:
        return None
    with progress.stage("Recording golden answers"):
        model = load_model(checkpoint)
        ids = [prompt.ids for prompt in prompts]
        answers, scores = greedy_decode(model, model.device, ids, TOKENS, set(checkpoint.special_tokens.end))
        source = _source(model.dtype)
        del model
        release_memory()
    return golden_record(source, prompts, answers, scores)


def _source(dtype: object) -> str:
    return f"transformers {installed_version('transformers')}, {str(dtype).removeprefix('torch.')}"
