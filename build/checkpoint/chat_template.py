"""Render a checkpoint's chat template in its own process.

A template is a program by an unknown author.

`python -m llmops.build.checkpoint.chat_template TOKENIZER_FOLDER` reads a JSON list of user
messages from its input and writes the list of renderings, or `{"error": …}`. Jinja's sandbox keeps
a template from files and from Python's internals; limits of the process bound its time and memory.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from llmops.errors import CheckpointError
from llmops.process import limit_process, module_command

TEMPLATE = "chat_template.jinja"
#: CPU seconds that the rendering process may use. Published templates take milliseconds.
_MAX_SECONDS = 3
#: Bytes of memory that the rendering process may use: the interpreter, and far more than any
#: published template allocates.
_MAX_MEMORY = 1 << 30
#: Seconds of wall-clock time that the rendering process may take. A busy machine gives it less CPU.
_TIMEOUT = 120.0
#: Maximum number of characters of one rendering. The messages have fewer than 100, and the default
#: system prompts of published templates up to 10,000.
_MAX_CHARACTERS = 1 << 15
#: The date that templates see: always the same, so that golden prompts do not depend on the day.
_DAY = datetime(2025, 1, 1)


def fixed_date() -> dict[str, Callable[[str], str]]:
    """Return the template variable `strftime_now`, which always formats the same day."""
    return {"strftime_now": lambda form: _DAY.strftime(form)}


def render_messages(folder: Path, texts: Sequence[str]) -> list[str] | None:
    """Render each text as a user's message with the chat template in `folder`.

    Returns:
        The renderings, or None if the folder has no chat template.

    Raises:
        ValueError: The template refuses a user's message.
        CheckpointError: The template takes too much time or memory.
    """
    if not (folder / TEMPLATE).is_file():
        return None
    too_much = CheckpointError(
        f"The chat template takes more than {_MAX_SECONDS} s or {_MAX_MEMORY >> 20} MiB to render a short message; "
        "use another template or checkpoint."
    )
    command = module_command("llmops.build.checkpoint.chat_template", str(folder))
    try:
        process = subprocess.run(
            command, input=json.dumps(list(texts)), capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
        answer = json.loads(process.stdout) if process.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError):
        raise too_much from None
    if answer is None:
        raise too_much
    if isinstance(answer, dict):
        raise ValueError(f"the chat template cannot render a user's message ({answer['error']})")
    return [str(text) for text in answer]


def _render(folder: Path, texts: list[str]) -> list[str] | dict[str, str]:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from llmops.chat_template_tags import GenerationTag

    extensions = [GenerationTag, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    names = {**_special_tokens(folder), **fixed_date()}
    limit_process(_MAX_SECONDS, _MAX_MEMORY)
    found = []
    try:
        template = environment.from_string((folder / TEMPLATE).read_text(encoding="utf-8"))
        for text in texts:
            messages = [{"role": "user", "content": text}]
            found.append(template.render(messages=messages, add_generation_prompt=True, **names))
            if len(found[-1]) > _MAX_CHARACTERS:
                return {"error": f"it renders the message to more than {_MAX_CHARACTERS:,} characters"}
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a template can fail with whatever its expressions raise
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return found


def _special_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of the special tokens in tokenizer_config.json."""
    path = folder / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


if __name__ == "__main__":
    print(json.dumps(_render(Path(sys.argv[1]), json.load(sys.stdin))))
