"""Try a tokenizer in its own process, because its author is unknown.

`tokenizers` runs regular expressions without a limit of time, and some files make its Rust code
panic or allocate more than the memory, which ends the process.

`python -m llmops.build.tokenizer.tokenizer_trial FILE` encodes some texts and writes `ok`, or why
the tokenizer cannot be used.
"""

import subprocess
import sys
from pathlib import Path

from llmops.build.checkpoint.chat_template import limit_process
from llmops.errors import CheckpointError
from llmops.process import module_command
from llmops.tokenizer_files import check_growth

#: CPU seconds that loading and the texts may take. The largest vocabularies load in 1.5 s.
_MAX_SECONDS = 10

#: Bytes of memory that the process may use.
_MAX_MEMORY = 2 << 30

#: Seconds of wall-clock time, enough for a machine that is busy with other work.
_TIMEOUT = 120.0

#: Texts on which a slow regular expression takes its time: runs of one kind, and an odd end.
_TEXTS = ("Hello", *(part * 400 + end for part in ("a", " ", "1", "aB", "é", "\n", "'s") for end in ("", "!\x00")))


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
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  a panic of the library is no Exception
        return str(error)[:300] or type(error).__name__
    return "" if counts[0] else "it makes no token of a text"


if __name__ == "__main__":
    limit_process(_MAX_SECONDS, _MAX_MEMORY)
    sys.stdout.write(_problem(Path(sys.argv[1])) or "ok")
