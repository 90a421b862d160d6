"""A replacement for trtllm-build that takes its arguments and starts a worker per rank.

It makes of each rank file an "engine" that depends on its content and on every flag. With HOLD=FIFO
the first worker writes its and its parent's process ids there after half of its file, and waits to
be ended.
"""

import hashlib
import json
import os
import pathlib
import sys
import time
from concurrent.futures import ProcessPoolExecutor

LIST_FLAGS = ("lora_dir", "lora_target_modules")


def arguments(words):
    flags = {}
    for word in words:
        if word.startswith("--"):
            name = word[2:]
            flags[name] = []
        else:
            flags[name].append(word)
    assert all(len(values) == 1 for name, values in flags.items() if name not in LIST_FLAGS), flags
    return flags


def build_rank(rank, flags):
    weights = pathlib.Path(flags["checkpoint_dir"][0]) / f"rank{rank}.safetensors"
    engine = pathlib.Path(flags["output_dir"][0]) / f"rank{rank}.engine"
    digest = hashlib.sha256(weights.read_bytes() + json.dumps(flags, sort_keys=True).encode()).hexdigest()
    with engine.open("w") as file:
        file.write(digest[:32])
        file.flush()
        if rank == 0 and "HOLD" in os.environ:
            with open(os.environ["HOLD"], "w") as fifo:
                fifo.write(f"{os.getpid()} {os.getppid()}")
            time.sleep(600)
        file.write(digest[32:])
    print(f"[TRT-LLM] [I] Serializing engine to {engine}...", flush=True)


def main():
    flags = arguments(sys.argv[1:])
    config = json.loads((pathlib.Path(flags["checkpoint_dir"][0]) / "config.json").read_text())
    output = pathlib.Path(flags["output_dir"][0])
    output.mkdir(exist_ok=True)
    ranks = config["mapping"]["world_size"]
    with ProcessPoolExecutor(int(flags["workers"][0])) as pool:
        list(pool.map(build_rank, range(ranks), [flags] * ranks))
    (output / "config.json").write_text(json.dumps({"pretrained_config": config, "build_config": flags}))


if __name__ == "__main__":
    main()
