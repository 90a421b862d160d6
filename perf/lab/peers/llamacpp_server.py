"""llama.cpp's own HTTP server from the wheel `xllamacpp`; runs in the peer's environment, needs nothing of llmops."""

from __future__ import annotations

import argparse
import os
import threading

import xllamacpp


def main() -> None:
    """Serve until terminated."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--parallel", type=int, default=32)
    parser.add_argument("--context", type=int, default=256, help="tokens per stream")
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.n_parallel = options.parallel
    params.n_ctx = options.parallel * options.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    # prompts are random: remembering them only costs
    params.cache_prompt, params.cache_ram_mib = False, 0
    params.verbosity = 0
    server = xllamacpp.Server(params)
    print(f"listening at {server.listening_address}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
