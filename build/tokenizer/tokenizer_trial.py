"""Try a tokenizer in its own process, because its author is unknown.

`tokenizers` runs regular expressions without a time limit. Some files make its Rust code panic, or
allocate more memory than the machine has, which ends the process.

`python -m llmops.build.tokenizer.tokenizer_trial FILE` encodes some texts and prints `ok`, or the
reason for which the tokenizer cannot be used.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import permutations
from pathlib import Path
from statistics import median
from time import process_time
from typing import TYPE_CHECKING

from llmops.errors import CheckpointError
from llmops.process import limit_process, module_command
from llmops.tokenizer_files import check_growth, patterns

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: CPU seconds that the trial's process may use. The largest vocabularies load in 1.5 s.
_MAX_SECONDS = 10

#: Bytes of memory that the trial's process may use, far more than the largest vocabularies need.
_MAX_MEMORY = 2 << 30

#: Seconds of wall-clock time that the trial's process may take, also on a busy machine.
_TIMEOUT = 120.0

#: Texts that are slow for a bad regular expression: runs of one kind, with an unusual end.
_TEXTS = ("Hello", *(part * 400 + end for part in ("a", " ", "1", "aB", "é", "\n", "'s") for end in ("", "!\x00")))

#: Length of a run of one character. A regular expression of quadratic time takes thirty times as
#: long as others for such a run.
_RUN = 16_384
#: Length of a run of two alternating characters. A regular expression of cubic time takes 50 s.
_PAIR_RUN = 4096

#: Maximum time of a run, as a multiple of the median. Known tokenizers reach 9: DeepSeek's, for runs
#: of line breaks.
_MAX_RATIO = 12
#: Seconds below which a run is fast enough, whatever its ratio. DeepSeek's line breaks take 0.04 s.
_MIN_SECONDS = 0.1

#: Maximum number of characters that are tried as runs because the tokenizer's regular expressions
#: contain them, besides those of ASCII. Bounds the time of a trial.
_MAX_OWN_RUNS = 64
#: Maximum number of characters that are tried in pairs because the tokenizer's regular expressions
#: contain them. The number of pairs is the square of this number.
_MAX_PAIRED = 16


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
    reason = said or f"it needs more than {_MAX_SECONDS} s or {_MAX_MEMORY >> 20} MiB, or ends its process"
    raise CheckpointError(f"The tokenizer of {ref} is damaged ({reason}); download it again.")


def _problem(path: Path) -> str:
    """Return the reason for which the tokenizer cannot be used, or an empty text."""
    from tokenizers import Tokenizer

    try:
        spec = check_growth(path)
        tokenizer = Tokenizer.from_file(str(path))
        # All readers of the engine's tokenizer turn truncation off too.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        counts = [len(tokenizer.encode(text).ids) for text in _TEXTS]
        own = sorted(set("".join(patterns([spec.get("normalizer"), spec.get("pre_tokenizer")]))))
        parts = sorted({*map(chr, range(32, 127)), "\n", *own[-_MAX_OWN_RUNS:]})
        runs = [(one * _RUN)[:_RUN] for one in parts]
        seconds = [_cpu_seconds(tokenizer, text) for text in runs]
        limit = max(_MAX_RATIO * median(seconds), _MIN_SECONDS)
        # Measure twice, because other programs disturb a measurement.
        if any(one > limit and _cpu_seconds(tokenizer, text) > limit for text, one in zip(runs, seconds, strict=True)):
            return f"it takes {max(seconds):.2g} s for {_RUN:,} characters that repeat"
        for pair in permutations([one for one in own if one.isalnum()][:_MAX_PAIRED], 2):
            tokenizer.encode("".join(pair) * (_PAIR_RUN // 2))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  a panic of the library is no Exception
        return str(error)[:300] or type(error).__name__
    return "" if counts[0] else "it encodes a text to no tokens"


def _cpu_seconds(tokenizer: Tokenizer, text: str) -> float:
    begun = process_time()
    tokenizer.encode(text)
    return process_time() - begun


if __name__ == "__main__":
    limit_process(_MAX_SECONDS, _MAX_MEMORY)
    sys.stdout.write(_problem(Path(sys.argv[1])) or "ok")
