"""Golden prompts: bundled texts whose greedy answers, as token ids, are recorded with an engine."""

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from llmops.build.checkpoint.chat_template import render_messages
from llmops.build.engine_folder.manifest import Golden, GoldenAnswer
from llmops.tokenizer_files import is_panic

#: Number of tokens per golden answer: enough to notice another model, few enough to take seconds.
TOKENS = 24
#: Maximum number of tokens of a golden prompt with its answer. The default system prompts of
#: published templates have up to 450, and attention takes memory in proportion to the square.
_MAX_TOKENS = 512


class GoldenPrompt(NamedTuple):
    """A golden prompt and its token ids.

    `ids` are the tokens that the model reads: `text` in the chat template, if the model has a chat
    template. `text_ids` are the tokens of `text` alone.
    """

    text: str
    ids: list[int]
    text_ids: list[int]


def golden_texts() -> list[str]:
    """Return the texts of the bundled golden prompts."""
    raw = resources.files("llmops.build.quantize").joinpath("data/golden_prompts.txt").read_text(encoding="utf-8")
    return [passage.strip() for passage in raw.split("\n%\n") if passage.strip()]


def golden_record(
    source: str, prompts: list[GoldenPrompt], tokens: list[list[int]], scores: list[list[float]]
) -> Golden:
    """Return the golden answers in the form of engine.json.

    Args:
        source: The program and dtype that gave the answers, as text.
        prompts: The golden prompts.
        tokens: The token ids of the answer to each prompt.
        scores: The log-probability of each token. A row may be longer than its row of `tokens`.
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
    """Return `tokens` up to and including the first token that is in `end`."""
    first = next((at for at, token in enumerate(tokens) if token in end), len(tokens))
    return tokens[: first + 1]


def golden_prompts(tokenizer_dir: Path, context: int, note: Callable[[str], None]) -> list[GoldenPrompt]:
    """Return the golden prompts for a tokenizer folder, without loading torch or transformers.

    The result is empty, after a note to the user, if the chat template refuses a user's message, or
    if a prompt and its answer have more than `context` or `_MAX_TOKENS` tokens.

    Raises:
        CheckpointError: The chat template takes too much time or memory.
    """
    try:
        prompts = _tokenised(tokenizer_dir)
    except BaseException as error:
        if not isinstance(error, ValueError) and not is_panic(error):
            raise
        note(f"No golden answers are kept: {error}.")
        return []
    longest, limit = max(len(prompt.ids) for prompt in prompts), min(context, _MAX_TOKENS) - TOKENS
    if longest > limit:
        note(f"No golden answers are kept: a short message has {longest:,} tokens as a prompt, more than {limit:,}.")
        return []
    return prompts


def _tokenised(tokenizer_dir: Path) -> list[GoldenPrompt]:
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
