"""Workloads from files: prompts (JSONL or plain lines), and traces (JSONL in Mooncake's format)."""

import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmops.errors import InputError
from llmops.input_files import MALFORMED, parse_json, read_lines
from llmops.perf.records import Request
from llmops.perf.workloads.base import SingleRequestSession
from llmops.perf.workloads.filler import Filler
from llmops.perf.workloads.lengths import Lengths
from llmops.perf.workloads.synthetic import PromptForm

#: Tokens of a block of a Mooncake trace. Each hash id of the trace stands for one block.
BLOCK_TOKENS = 512
#: Maximum number of tokens of a prompt or an answer, which is more than any model's context.
MAX_LENGTH = 10_000_000


def _lines(path: Path) -> list[tuple[int, str]]:
    """Return the number and text of each line that is not blank.

    Raise InputError for a bad file.
    """
    try:
        lines = [(number, line) for number, line in enumerate(read_lines(path), 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(f"{path} cannot be read as text ({reason}); name a text file in UTF-8.") from error
    if not lines:
        raise InputError(f"{path} is empty; write one prompt or JSON object per line.")
    return lines


def _json_line(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise InputError(f"{path}, line {number}: not JSON ({error}); write one JSON object per line.") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}, line {number}: not a JSON object; write one per line.")
    return value


class PromptFile:
    """A workload of the prompts of a file, in order and repeated.

    A line is `{"messages": […]}`, `{"prompt": "…"}` or plain text.
    """

    def __init__(self, path: Path, output: Lengths, form: PromptForm, seed: int) -> None:
        self._output = output
        self._form = form
        self._seed = seed
        self._prompts = [self._parse(path, number, line) for number, line in _lines(path)]

    def _parse(self, path: Path, number: int, line: str) -> dict[str, Any]:
        if path.suffix not in (".jsonl", ".json") and not line.startswith("{"):
            return {"prompt": line}
        value = _json_line(path, number, line)
        if "messages" not in value and "prompt" not in value:
            raise InputError(f'{path}, line {number}: "messages" or "prompt" is missing; add one of them.')
        if self._form == "prompt" and "prompt" not in value:
            raise InputError(f'{path}, line {number}: "messages" needs a chat endpoint; give "prompt" instead.')
        most = value.get("max_tokens", 1)
        if not isinstance(most, int) or not 0 < most <= MAX_LENGTH:
            raise InputError(f'{path}, line {number}: "max_tokens" must be from 1 to {MAX_LENGTH:,}.')
        return value

    def session(self, index: int) -> SingleRequestSession:
        value = self._prompts[index % len(self._prompts)]
        drawn = self._output.draw(random.Random(f"output {self._seed} {index}"))
        request = Request(max_tokens=int(value.get("max_tokens", drawn)), tools=value.get("tools"))
        if self._form == "prompt":
            request.prompt = value["prompt"]
        else:
            request.messages = value.get("messages") or [{"role": "user", "content": value["prompt"]}]
        return SingleRequestSession(request)


@dataclass(frozen=True)
class TraceEntry:
    """A request of a trace.

    `at` is in seconds from the start of the trace, and lengths are in tokens.
    """

    at: float
    input_length: int
    output_length: int
    hash_ids: list[int] = field(default_factory=list)


def read_trace(path: Path) -> list[TraceEntry]:
    """Return the entries of a trace in Mooncake's format, sorted by time.

    The file has timestamps in milliseconds. Raise InputError if an entry is invalid.
    """
    entries = [_entry(path, number, line) for number, line in _lines(path)]
    return sorted(entries, key=lambda entry: entry.at)


def _entry(path: Path, number: int, line: str) -> TraceEntry:
    value = _json_line(path, number, line)
    try:
        at = float(value["timestamp"]) / 1000
        lengths = int(value["input_length"]), int(value["output_length"])
        hashes = [int(item) for item in value.get("hash_ids", [])]
    except MALFORMED as error:
        needed = "timestamp (ms), input_length and output_length (tokens)"
        raise InputError(f"{path}, line {number}: {needed} must be numbers.") from error
    if not 0 <= at < math.inf or min(lengths) < 1 or max(lengths) > MAX_LENGTH:
        raise InputError(
            f"{path}, line {number}: the time must be at least 0, and lengths must be from 1 to {MAX_LENGTH:,}."
        )
    return TraceEntry(at, *lengths, hashes)


class TraceWorkload:
    """A workload of the requests of a trace.

    Equal hash ids become equal blocks of prompts, so that the prefix cache finds them.
    """

    def __init__(self, entries: list[TraceEntry], filler: Filler, form: PromptForm, seed: int) -> None:
        self._entries = entries
        self._filler = filler
        self._form = form
        self._seed = seed

    def session(self, index: int) -> SingleRequestSession:
        entry = self._entries[index % len(self._entries)]
        request = Request(max_tokens=entry.output_length)
        prompt = self._prompt(entry, index)
        if self._form == "prompt":
            request.prompt = prompt
        else:
            request.messages = [{"role": "user", "content": prompt}]
        return SingleRequestSession(request)

    def _prompt(self, entry: TraceEntry, index: int) -> Any:
        parts, left = [], entry.input_length
        for hash_id in entry.hash_ids:
            size = min(BLOCK_TOKENS, left)
            if size > 0:
                # The whole block is drawn before it is cut, so that a short last block is a prefix
                # of the same block in longer prompts.
                parts.append(self._filler.make(random.Random(f"block {hash_id}"), size))
            left -= size
        if left > 0:
            parts.append(self._filler.make(random.Random(f"tail {self._seed} {index}"), left))
        return self._filler.join(*parts)
