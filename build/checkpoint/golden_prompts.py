"""The golden prompts: bundled texts whose greedy answers are recorded with an engine, as token ids."""

from importlib import resources
from pathlib import Path
from typing import NamedTuple

from llmops.build.checkpoint.chat_template import render_messages
from llmops.build.engine_folder.manifest import Golden, GoldenAnswer

#: Greedy tokens per answer.
TOKENS = 24


class GoldenPrompt(NamedTuple):
    """A prompt.

    `ids` is what the model reads, through the chat template where there is one; `text_ids` is the
    text alone.
    """

    text: str
    ids: list[int]
    text_ids: list[int]


def golden_texts() -> list[str]:
    """Return the bundled prompts."""
    raw = resources.files("llmops.build.quantize").joinpath("data/golden_prompts.txt").read_text(encoding="utf-8")
    return [passage.strip() for passage in raw.split("\n%\n") if passage.strip()]


def golden_record(
    source: str, prompts: list[GoldenPrompt], tokens: list[list[int]], scores: list[list[float]]
) -> Golden:
    """Return the answers as engine.json keeps them.

    Rows of `scores` may be longer than their tokens.
    """
    rows = zip(prompts, tokens, scores, strict=True)
    return Golden(
        source=source,
        answers=[
            GoldenAnswer(**prompt._asdict(), tokens=row, log_probs=[round(score, 5) for score in found[: len(row)]])
            for prompt, row, found in rows
        ],
    )


def truncate_at_end(tokens: list[int], end: set[int]) -> list[int]:
    """Return the tokens up to and including the first one that ends the answer."""
    first = next((at for at, token in enumerate(tokens) if token in end), len(tokens))
    return tokens[: first + 1]


def golden_prompts(tokenizer_dir: Path) -> list[GoldenPrompt]:
    """Return the golden prompts for a tokenizer folder, with neither torch nor transformers.

    Raises:
        ValueError: The chat template refuses a user's message.
        CheckpointError: The chat template takes too much time or memory.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    texts = golden_texts()
    rendered = render_messages(tokenizer_dir, texts)
    prompts = []
    for at, text in enumerate(texts):
        alone = list(tokenizer.encode(text).ids)
        ids = alone if rendered is None else list(tokenizer.encode(rendered[at], add_special_tokens=False).ids)
        prompts.append(GoldenPrompt(text, ids, alone))
    return prompts
