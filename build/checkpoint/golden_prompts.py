"""The golden prompts as token ids, and what keeps a chat template from writing today's date into them."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from llmops.build.engine_folder.manifest import Golden, GoldenAnswer

# greedy tokens per answer
TOKENS = 24
_DAY = datetime(2025, 1, 1)


class GoldenPrompt(NamedTuple):
    """`ids`: what the model reads, through the chat template where there is one. `text_ids`: the text alone."""

    text: str
    ids: list[int]
    text_ids: list[int]


def golden_texts() -> list[str]:
    """The bundled prompts."""
    raw = resources.files("llmops.build.quantize").joinpath("data/golden_prompts.txt").read_text(encoding="utf-8")
    return [passage.strip() for passage in raw.split("\n%\n") if passage.strip()]


def fixed_date() -> dict[str, Callable[[str], str]]:
    """Variables for a chat template that asks for the date: the same prompt on every day."""
    return {"strftime_now": lambda form: _DAY.strftime(form)}


def collected(source: str, prompts: list[GoldenPrompt], tokens: list[list[int]], scores: list[list[float]]) -> Golden:
    """What engine.json keeps; `scores` may be longer than the tokens."""
    rows = zip(prompts, tokens, scores, strict=True)
    return Golden(
        source=source,
        answers=[
            GoldenAnswer(**prompt._asdict(), tokens=row, log_probs=[round(score, 5) for score in found[: len(row)]])
            for prompt, row, found in rows
        ],
    )


def until_end(tokens: list[int], end: set[int]) -> list[int]:
    """Up to the first token that ends the answer, it included."""
    first = next((at for at, token in enumerate(tokens) if token in end), len(tokens))
    return tokens[: first + 1]


def golden_prompts(tokenizer_dir: Path) -> list[GoldenPrompt]:
    """Of an engine's tokenizer folder, with neither torch nor transformers."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    render = _renderer(tokenizer_dir)

    def ids(text: str) -> list[int]:
        if render is None:
            return list(tokenizer.encode(text).ids)
        return list(tokenizer.encode(render(text), add_special_tokens=False).ids)

    return [GoldenPrompt(text, ids(text), list(tokenizer.encode(text).ids)) for text in golden_texts()]


def _renderer(folder: Path) -> Callable[[str], str] | None:
    """One user message through the folder's chat template."""
    path = folder / "chat_template.jinja"
    if not path.is_file():
        return None
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    template = environment.from_string(path.read_text(encoding="utf-8"))
    names = {**_special_tokens(folder), **fixed_date()}

    def render(text: str) -> str:
        messages = [{"role": "user", "content": text}]
        try:
            return template.render(messages=messages, add_generation_prompt=True, **names)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template cannot render a user's message ({error})") from error

    return render


def _special_tokens(folder: Path) -> dict[str, str]:
    path = folder / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
