"""Try a tokenizer in its own process, because its author is unknown.

`tokenizers` runs regular expressions without a limit of time, and some files make its Rust code
panic or allocate more than the memory, which ends the process.

`python -m llmops.build.tokenizer.tokenizer_trial FILE` encodes some texts and writes `ok`, or why
the tokenizer cannot be used.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import permutations
from pathlib import Path
from statistics import median
from time import process_time
from typing import TYPE_CHECKING

from llmops.build.checkpoint.chat_template import limit_process
from llmops.errors import CheckpointError
from llmops.input_files import MAX_TABLE_BYTES, read_json
from llmops.process import module_command
from llmops.tokenizer_files import check_growth, patterns

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: CPU seconds that loading and the texts may take. The largest vocabularies load in 1.5 s.
_MAX_SECONDS = 10

#: Bytes of memory that the process may use.
_MAX_MEMORY = 2 << 30

#: Seconds of wall-clock time, enough for a machine that is busy with other work.
_TIMEOUT = 120.0

#: Texts on which a slow regular expression takes its time: runs of one kind, and an odd end.
_TEXTS = ("Hello", *(part * 400 + end for part in ("a", " ", "1", "aB", "é", "\n", "'s") for end in ("", "!\x00")))

#: Characters of a run of one character, and of one of two. A regular expression of quadratic time
#: takes thirty times as long as others for the first, and one of cubic time 50 s for the second.
_RUN, _PAIR_RUN = 16_384, 4096

#: How many times as long as the median a run may take. Known tokenizers have up to 9, of DeepSeek's
#: for runs of line breaks, which take 0.04 s. Runs below so many seconds are not compared.
_MAX_RATIO, _MIN_SECONDS = 12, 0.1

#: Characters of regular expressions of which runs, and pairs, are tried.
_MAX_OWN_RUNS, _MAX_PAIRED = 64, 16


def try_tokenizer(path: Path, ref: str) -> None:
    """Raise CheckpointError if the tokenizer in `path` fails, or takes too much time or memory."""
    command = module_command("llmops.build.tokenizer.tokenizer_trial", str(path))
    try:
        process = subprocess.run(command, capture_output=True, timeout=_TIMEOUT, check=False)
        said = process.stdout.decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        said = ""
    if said == "ok":
        return
    reason = said or f"it takes more than {_MAX_SECONDS} s or {_MAX_MEMORY >> 20} MiB, or ends its process"
    raise CheckpointError(f"The tokenizer of {ref} is damaged ({reason}); download it again.")


def _problem(path: Path) -> str:
    """Return why the tokenizer cannot be used, or an empty text."""
    from tokenizers import Tokenizer

    try:
        check_growth(path)
        tokenizer = Tokenizer.from_file(str(path))
        # as all readers of the engine's folder do
        tokenizer.no_truncation()
        tokenizer.no_padding()
        counts = [len(tokenizer.encode(text).ids) for text in _TEXTS]
        spec = read_json(path, MAX_TABLE_BYTES)
        own = sorted(set("".join(patterns([spec.get("normalizer"), spec.get("pre_tokenizer")]))))
        runs = [one * _RUN for one in sorted({*map(chr, range(32, 127)), "\n", *own[-_MAX_OWN_RUNS:]})]
        seconds = [_cpu_seconds(tokenizer, text) for text in runs]
        limit = max(_MAX_RATIO * median(seconds), _MIN_SECONDS)
        # twice, because other programs disturb a measurement
        if any(one > limit and _cpu_seconds(tokenizer, text) > limit for text, one in zip(runs, seconds, strict=True)):
            return f"its regular expressions take {max(seconds):.2g} s for {_RUN:,} equal characters"
        for pair in permutations([one for one in own if one.isalnum()][:_MAX_PAIRED], 2):
            tokenizer.encode("".join(pair) * (_PAIR_RUN // 2))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  a panic of the library is no Exception
        return str(error)[:300] or type(error).__name__
    return "" if counts[0] else "it makes no token of a text"


def _cpu_seconds(tokenizer: Tokenizer, text: str) -> float:
    begun = process_time()
    tokenizer.encode(text)
    return process_time() - begun


if __name__ == "__main__":
    limit_process(_MAX_SECONDS, _MAX_MEMORY)
    sys.stdout.write(_problem(Path(sys.argv[1])) or "ok")
