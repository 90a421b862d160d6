"""Convert the older forms of a tokenizer to tokenizer.json in a process of its own.

transformers takes time in proportion to the square of a token's length, and the author of the files
is unknown.

`python -m llmops.build.tokenizer.slow_conversion CHECKPOINT FOLDER` writes the tokenizer files into
FOLDER and prints `ok`, or the reason for which the tokenizer cannot be converted.
"""

import os
import subprocess
import sys
from pathlib import Path

from llmops.errors import CheckpointError
from llmops.process import limit_process, module_command

#: CPU seconds that the process may use. The largest vocabularies, of Llama 4 and Gemma 3, take 8 s
#: with the import of transformers.
_MAX_SECONDS = 30
#: Bytes of memory that the process may use.
_MAX_MEMORY = 4 << 30
#: Seconds of wall-clock time that the process may take, also on a busy machine.
_TIMEOUT = 240.0


def convert_slow(checkpoint: Path, directory: Path, ref: str) -> None:
    """Convert tokenizer.model, or vocab.json with merges.txt, to tokenizer.json in `directory`.

    Raises:
        CheckpointError: The files cannot be converted, or take too much time or memory.
    """
    command = module_command("llmops.build.tokenizer.slow_conversion", str(checkpoint), str(directory))
    try:
        # Threads of linear algebra would take address space for each processor.
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.run(command, env=env, capture_output=True, timeout=_TIMEOUT, check=False)
        said = process.stdout.decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        said = ""
    if said != "ok":
        reason = said or f"it needs more than {_MAX_SECONDS} s or {_MAX_MEMORY >> 20} MiB, or ends its process"
        raise CheckpointError(
            f"The tokenizer of {ref} cannot be converted ({reason}); add a tokenizer.json to the checkpoint."
        )


def _problem(checkpoint: str, directory: str) -> str:
    """Return the reason for which the tokenizer cannot be converted, or an empty text."""
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False).save_pretrained(directory)
    except Exception as error:  # noqa: BLE001 - transformers raises errors of many kinds here
        return " ".join(str(error).split())[:300] or type(error).__name__
    return ""


if __name__ == "__main__":
    # Without torch, which the conversion does not use, transformers is imported in half the time.
    sys.modules["torch"] = None  # type: ignore[assignment]
    limit_process(_MAX_SECONDS, _MAX_MEMORY)
    sys.stdout.write(_problem(*sys.argv[1:]) or "ok")
