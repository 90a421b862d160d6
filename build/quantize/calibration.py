"""Read calibration texts, bundled, from a file or from the hub, and tokenise them into batches."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmops.errors import InputError, MissingDependencyError
from llmops.input_files import parse_json
from llmops.process import limit_process, module_command

if TYPE_CHECKING:
    import torch

BUNDLED = "bundled"
#: Maximum number of tokens of each text that the quality gate reads.
EVALUATION_LENGTH = 256
#: Maximum bytes of float32 decoder layers that the quality gate keeps in memory instead of reading
#: them again. All layers of a small model fit.
CACHED_LAYERS_BYTES = 512 << 20
#: Maximum bytes of a float32 embedding, or output matrix, that the quality gate keeps in memory.
#: Rows of a larger matrix are read from the file each time.
CACHED_TABLE_BYTES = 256 << 20
#: Maximum memory, in bytes, of the texts that are read from a file. Calibration with the default
#: settings uses 1 MB of texts.
MAX_TEXT_BYTES = 64 << 20
#: Maximum bytes of a line. A row of a data set has a few KB.
MAX_LINE_BYTES = 4 << 20
#: Maximum rows of a Parquet file that are decoded together. A dictionary stores a value once, so
#: that a small file may have a million long texts.
MAX_ROWS = 64
#: CPU seconds and bytes of memory that the process which reads a Parquet file may use.
_PARQUET_SECONDS, _PARQUET_MEMORY = 60, 1 << 30
#: Maximum characters of a text that are tokenised for each token of a sequence. A token of a text
#: in a natural language has four characters.
MAX_TOKEN_CHARACTERS = 64
_TEXT_FIELDS = ("text", "prompt", "content", "article", "instruction")


@dataclass(frozen=True)
class CalibrationSettings:
    """The settings of calibration: at most `size` sequences of `seq_len` tokens.

    `batch_size` sequences run together. `resolved` replaces None with a default. `dataset` is
    `bundled`, a .jsonl, .txt or .parquet file, or a hub id.
    """

    dataset: str = BUNDLED
    size: int | None = None
    seq_len: int = 512
    batch_size: int | None = None
    seed: int = 1234

    def resolved(self, gpu: bool, limit: int) -> tuple[int, int]:
        """Return the number of sequences and the batch size, with defaults in place of None.

        As in NVIDIA's quantize.py, the default is 512 sequences, or 32 (`limit`) for AWQ. AWQ runs
        eight sequences together, because it quantises all weights eleven times for every batch. A
        CPU (`gpu` is False) also runs eight together: 64 sequences, or 8 for AWQ.
        """
        size = min(512, limit) if gpu else min(64, max(limit // 4, 8))
        return self.size or size, self.batch_size or (1 if gpu and limit >= 512 else 8)

    def describe(self, gpu: bool, limit: int) -> str:
        """Return the line of the dry run about calibration, without reading the texts.

        `resolved` explains the arguments.
        """
        size, batch = self.resolved(gpu, limit)
        source = "the bundled texts" if self.dataset == BUNDLED else self.dataset
        return f"calibrates on up to {size} sequences of {self.seq_len} tokens, {batch} at a time, of {source}"


def bundled_texts(name: str = "calibration") -> list[str]:
    """Return the passages of `data/<name>.txt`, separated by lines of `%`.

    data/SOURCES.md names the origins of the passages.
    """
    raw = resources.files("llmops.build.quantize").joinpath("data").joinpath(f"{name}.txt").read_text(encoding="utf-8")
    return [passage.strip() for passage in raw.split("\n%\n") if passage.strip()]


def load_texts(settings: CalibrationSettings) -> list[str]:
    """Return the calibration texts, shuffled with `seed`.

    Only the beginning of a large file is read, up to MAX_TEXT_BYTES in memory.

    Raises:
        InputError: The data cannot be used.
    """
    texts = _read(settings.dataset)
    if not texts:
        raise InputError(f"--calib-data {settings.dataset} has no text; give one text per line or JSON object.")
    random.Random(settings.seed).shuffle(texts)
    return texts


def check_data(settings: CalibrationSettings) -> None:
    """Check that the data can be used, without fetching data from the hub.

    Raises:
        InputError: The data cannot be used.
        MissingDependencyError: The library that reads the data is not installed.
    """
    if settings.dataset == BUNDLED or _is_local(settings.dataset):
        load_texts(settings)
    elif find_spec("pyarrow") is None:
        raise MissingDependencyError(_NO_PYARROW)


def _read(dataset: str) -> list[str]:
    if dataset == BUNDLED:
        return bundled_texts()
    if not _is_local(dataset):
        return _hub(dataset)
    path = Path(dataset).expanduser()
    if not path.is_file() or path.suffix not in _READERS:
        problem = "has a suffix that llmops does not read" if path.exists() else "does not exist"
        raise InputError(f"--calib-data {dataset} {problem}; give a .jsonl, .txt or .parquet file.")
    return _first(_READERS[path.suffix](path))


def _first(texts: Iterable[str]) -> list[str]:
    found, size = [], 0
    for text in texts:
        size += sys.getsizeof(text)
        if size > MAX_TEXT_BYTES:
            break
        if text:
            found.append(text)
    return found


def _is_local(dataset: str) -> bool:
    path = Path(dataset).expanduser()
    return path.suffix in _READERS or path.exists()


def _jsonl(path: Path) -> Iterator[str]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            try:
                yield _text_of(parse_json(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                reason = f" ({error})" if isinstance(error, ValueError) else ""
                raise InputError(
                    f"{path}, line {number} has no text{reason}; each line must be a JSON object with one of "
                    f"{', '.join(_TEXT_FIELDS)} or messages."
                ) from None


def _lines(path: Path) -> Iterator[str]:
    start = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                problem = f"has a line of more than {MAX_LINE_BYTES >> 20} MiB"
                raise InputError(f"--calib-data {path} {problem}; give texts in shorter lines.")
            try:
                yield line.decode().replace("\r\n", "\n")
            except UnicodeDecodeError as error:
                at = start + error.start
                raise InputError(f"--calib-data {path} is not UTF-8 (byte {at}); convert the file to UTF-8.") from None
            start += len(line)


def _text_of(row: Any) -> str:
    """Return the text of a row, which may be empty. The messages of a chat are joined.

    Raises KeyError, TypeError or AttributeError for other rows.
    """
    if isinstance(row, str):
        return row
    named = [row[name] for name in _TEXT_FIELDS if isinstance(row.get(name), str)]
    if named:
        return next(filter(None, named), "")
    return "\n".join(filter(None, (_content(message["content"]) for message in row["messages"])))


def _content(content: Any) -> str:
    """Return the text of a message: empty for a tool call, and the joined texts of its parts."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if isinstance(part.get("text"), str))
    return "" if content is None else str(content)


def _txt(path: Path) -> Iterator[str]:
    """Yield the passages of a text file, separated by empty lines.

    A passage that is longer than a line may be is divided.
    """
    passage = ""
    for line in _lines(path):
        if line == "\n" or len(passage) > MAX_LINE_BYTES:
            yield passage.strip()
            passage = ""
        passage += line
    yield passage.strip()


def _parquet(path: Path) -> Iterator[str]:
    """Yield the texts of a Parquet file, which its own process reads.

    A file of a few hundred bytes can have a row of any size.
    """
    if find_spec("pyarrow") is None:
        raise MissingDependencyError(_NO_PYARROW)
    command = module_command("llmops.build.quantize.calibration", str(path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        for line in process.stdout or ():
            found = json.loads(line)
            if not isinstance(found, str):
                raise InputError(found[0])
            yield found
    if process.returncode:
        too_much = f"takes more than {_PARQUET_SECONDS} s or {_PARQUET_MEMORY >> 20} MiB to read"
        raise InputError(f"--calib-data {path} {too_much}; write it again with shorter rows.")


def _print_texts(path: Path) -> None:
    """Print the first texts of a Parquet file, or a list with an error, as one line of JSON each."""
    import pyarrow.parquet

    # The default pool reserves 1 GiB of addresses at a time.
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    limit_process(_PARQUET_SECONDS, _PARQUET_MEMORY)
    try:
        for text in _first(_parquet_rows(path)):
            print(json.dumps(text))
    except InputError as error:
        print(json.dumps([error.message]))


def _parquet_rows(path: Path) -> Iterator[str]:
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path, buffer_size=1 << 20) as file:
            names = file.schema_arrow.names
            name = next(name for name in (*_TEXT_FIELDS, "messages") if name in names)
            for batch in file.iter_batches(MAX_ROWS, columns=[name], use_threads=False):
                yield from (_text_of({name: row.as_py()}) for row in batch.column(0) if row.is_valid)
    except (StopIteration, KeyError, TypeError, AttributeError):
        raise InputError(
            f"{path} has no column of text; name a column {', '.join(_TEXT_FIELDS)} or messages."
        ) from None
    except (ValueError, OSError) as error:
        raise InputError(f"--calib-data {path} cannot be read as Parquet ({error}); give another file.") from error


_READERS = {".jsonl": _jsonl, ".txt": _txt, ".parquet": _parquet}
# pyarrow 22 and later need NumPy 2, and Triton's Python backend has NumPy 1.
_NO_PYARROW = "Reading .parquet needs pyarrow: pip install 'pyarrow<22'."


def _hub(dataset: str) -> list[str]:
    """Return the texts of one file of a data set on the hub.

    Files of the split `train` come first. If several files remain, the last by name is read.
    """
    import huggingface_hub

    from llmops.build.checkpoint.hub_download import check_cache

    name = "abisee/cnn_dailymail" if dataset in ("cnn_dailymail", "ccdv/cnn_dailymail") else dataset
    try:
        check_cache(name, "datasets")
        files = [file for file in huggingface_hub.list_repo_files(name, repo_type="dataset") if file.endswith(_ON_HUB)]
        chosen = max(files, key=lambda file: ("train" in Path(file).name, file), default=None)
        found = Path(huggingface_hub.hf_hub_download(name, chosen, repo_type="dataset")) if chosen else None
    # huggingface_hub's errors have no common base (see build/checkpoint/hub_download.py).
    except Exception as error:
        raise InputError(f"--calib-data {dataset} cannot be read from the hub ({error}); give a local file.") from error
    if found is None:
        raise InputError(f"--calib-data {dataset} has no {' or '.join(_ON_HUB)} file on the hub; give a local file.")
    return _first(_READERS[found.suffix](found))


_ON_HUB = (".jsonl", ".parquet")


def pack_sequences(texts: list[str], tokenizer: Any, size: int, seq_len: int) -> list[list[int]]:
    """Return at most `size` sequences of `seq_len` token ids.

    An end-of-text token separates texts, which follow one another, so that short texts need no
    padding. Only the last sequence may be shorter.
    """
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    found: list[int] = []
    for text in texts:
        # Of a text that is longer than a sequence, only the beginning is used, as in NVIDIA's
        # loaders.
        text = text[: seq_len * MAX_TOKEN_CHARACTERS]
        found += [*tokenizer(text, truncation=True, max_length=seq_len)["input_ids"][: seq_len - len(end)], *end]
        if len(found) >= size * seq_len:
            break
    cut = [found[start : start + seq_len] for start in range(0, len(found), seq_len)][:size]
    return [ids for ids in cut if len(ids) > 1]


def batches(found: list[list[int]], batch_size: int) -> Iterator[torch.Tensor]:
    """Yield batches, int64 tensors (batch, tokens), of sequences of the same length.

    Batches of the same length differ by at most one sequence, because AWQ gives a small batch the
    same weight as a large batch.
    """
    import torch

    for _, group in groupby(found, key=len):
        same = list(group)
        step = math.ceil(len(same) / math.ceil(len(same) / batch_size))
        for start in range(0, len(same), step):
            yield torch.tensor(same[start : start + step])


if __name__ == "__main__":
    _print_texts(Path(sys.argv[1]))
