"""Golden answers of a checkpoint through transformers, for builds that have no quality gate."""

from __future__ import annotations

from llmops.build.checkpoint import Checkpoint
from llmops.build.checkpoint.golden_prompts import TOKENS, GoldenPrompt, golden_record, golden_texts
from llmops.build.engine_folder.manifest import Golden
from llmops.build.installed_versions import installed_version
from llmops.build.progress import Progress


def golden_of_checkpoint(checkpoint: Checkpoint, progress: Progress) -> Golden:
    """Needs torch and transformers, and the memory of the unquantised model."""
    from llmops.build.quality.reference_answers import golden_ids, greedy_decode
    from llmops.build.quantize.model_loading import load_model, load_tokenizer, release_memory

    with progress.stage("Recording golden answers"):
        model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
        prompts, texts = golden_ids(tokenizer), golden_texts()
        answers, scores = greedy_decode(model, model.device, prompts, TOKENS, set(checkpoint.special_tokens.end))
        source = f"transformers {installed_version('transformers')}, {str(model.dtype).removeprefix('torch.')}"
        del model
        release_memory()
    found = [
        GoldenPrompt(text, ids, list(tokenizer(text)["input_ids"])) for text, ids in zip(texts, prompts, strict=True)
    ]
    return golden_record(source, found, answers, scores)
