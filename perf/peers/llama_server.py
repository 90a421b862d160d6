"""llama.cpp's server on one GGUF file: `python llama_server.py GGUF PORT [SLOTS]`, until standard input closes.

Stands alone, so that it runs in an environment of its own: `pip install --no-deps xllamacpp`.
"""

from __future__ import annotations

import os
import sys

TOKENS_PER_SLOT = 256


def main() -> None:
    """Prints one line, the address, when the server answers."""
    import xllamacpp

    gguf, port, slots = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 32
    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.verbosity = gguf, port, 0
    params.n_parallel, params.n_ctx = slots, slots * TOKENS_PER_SLOT
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    # Every measured prompt is new; keeping old ones would only cost memory.
    params.cache_prompt, params.cache_ram_mib = False, 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
