"""Calibration texts: bundled, from a file, or from the hub; tokenised into batches."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmops.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    import torch

BUNDLED = "bundled"
_TEXT_FIELDS = ("text", "prompt", "content", "article", "instruction")


@dataclass(frozen=True)
class CalibrationSettings:
    """`size` texts of at most `seq_len` tokens, `batch_size` at a time; defaults are NVIDIA's quantize.py.

    `dataset` is `bundled`, a .jsonl, .txt or .parquet file, or a hub id (its `train` split).
    """

    dataset: str = BUNDLED
    size: int = 512
    seq_len: int = 512
    batch_size: int = 1
    seed: int = 1234


def bundled_texts(name: str = "calibration") -> list[str]:
    """The passages of `data/<name>.txt`, which are separated by lines of `%`; data/SOURCES.md says whence."""
    raw = resources.files("llmops.build.quantize").joinpath("data").joinpath(f"{name}.txt").read_text(encoding="utf-8")
    return [passage.strip() for passage in raw.split("\n%\n") if passage.strip()]


def load_texts(settings: CalibrationSettings) -> list[str]:
    """At most `size` texts, drawn with `seed` when there are more. Raises InputError for unusable data."""
    texts = _read(settings.dataset)
    if not texts:
        raise InputError(f"--calib-data {settings.dataset} has no text; give one text per line or JSON object.")
    random.Random(settings.seed).shuffle(texts)
    return texts[: settings.size]


def _read(dataset: str) -> list[str]:
    if dataset == BUNDLED:
        return bundled_texts()
    path = Path(dataset).expanduser()
    readers = {".jsonl": _jsonl, ".txt": _txt, ".parquet": _parquet}
    if path.suffix in readers:
        if not path.is_file():
            raise InputError(f"--calib-data {dataset} does not exist; give a .jsonl, .txt or .parquet file.")
        return readers[path.suffix](path)
    return _hub(dataset)


def _jsonl(path: Path) -> list[str]:
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                texts.append(_text_of(json.loads(line)))
            except (ValueError, KeyError):
                raise InputError(
                    f"{path}, line {number} has no text; each line must be a JSON object with one of "
                    f"{', '.join(_TEXT_FIELDS)} or messages."
                ) from None
    return texts


def _text_of(row: Any) -> str:
    """A row's text; chats become their messages one after the other. Raises KeyError."""
    if isinstance(row, str):
        return row
    for name in _TEXT_FIELDS:
        if isinstance(row.get(name), str) and row[name]:
            return str(row[name])
    return "\n".join(str(message["content"]) for message in row["messages"])


def _txt(path: Path) -> list[str]:
    """Passages are separated by empty lines."""
    return [part.strip() for part in path.read_text(encoding="utf-8").split("\n\n") if part.strip()]


def _parquet(path: Path) -> list[str]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingDependencyError("Reading .parquet needs pyarrow: pip install pyarrow.") from error
    table = parquet.read_table(path)
    name = next((name for name in _TEXT_FIELDS if name in table.column_names), None)
    if name is None:
        raise InputError(f"{path} has no column of text; one of {', '.join(_TEXT_FIELDS)} is needed.")
    return [str(value) for value in table.column(name).to_pylist() if value]


def _hub(dataset: str) -> list[str]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingDependencyError("Calibration data from the hub needs: pip install datasets.") from error
    name = "abisee/cnn_dailymail" if dataset in ("cnn_dailymail", "ccdv/cnn_dailymail") else dataset
    try:
        rows = load_dataset(name, "3.0.0" if name == "abisee/cnn_dailymail" else None, split="train", streaming=True)
        return [_text_of(row) for _, row in zip(range(4096), rows, strict=False)]
    except Exception as error:
        raise InputError(f"--calib-data {dataset} cannot be read from the hub ({error}); give a local file.") from error


def batches(texts: list[str], tokenizer: Any, settings: CalibrationSettings) -> Iterator[dict[str, torch.Tensor]]:
    """`input_ids` and `attention_mask`, int64 (batch, tokens), left-padded."""
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    for start in range(0, len(texts), settings.batch_size):
        part = texts[start : start + settings.batch_size]
        encoded = tokenizer(
            part, return_tensors="pt", padding=len(part) > 1, truncation=True, max_length=settings.seq_len
        )
        yield {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
