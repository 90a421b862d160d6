"""One OpenVINO GenAI pipeline in a process of its own, driven line by line by `study`.

Argument: {"model": folder, "properties": {…}, "scheduler": {…}}. Each line on standard input asks for a batch,
`STREAMS INPUT_TOKENS OUTPUT_TOKENS`, or for two first tokens, `prefix INPUT_TOKENS`; each answer is one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

SCHEDULER = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "num_kv_blocks": 2048, "enable_prefix_caching": True}


class Worker:
    """`folder` holds openvino_model.xml and .bin. `load_seconds` is what the pipeline took to be ready."""

    def __init__(self, folder: str, properties: dict[str, Any], scheduler: dict[str, Any]) -> None:
        config = genai.SchedulerConfig()
        for name, value in {**SCHEDULER, **scheduler}.items():
            setattr(config, name, value)
        begin = time.perf_counter()
        self.pipeline = genai.ContinuousBatchingPipeline(folder, config, "CPU", properties)
        self.load_seconds = time.perf_counter() - begin
        self.random = np.random.default_rng(0)
        self.requests = 0

    def batch(self, streams: int, inputs: int, outputs: int) -> dict[str, float]:
        """All requests at once, to their last token. Prompts are random, so that no prefix is shared."""
        begin = time.perf_counter()
        handles = [self._submit(self._prompt(inputs), outputs) for _ in range(streams)]
        tokens = 0
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            tokens += sum(_drain(handle) for handle in handles)
        return {"tokens": tokens, "seconds": time.perf_counter() - begin}

    def prefix(self, inputs: int) -> dict[str, float]:
        """Time to first token, in seconds, of a new prompt and of the same one again."""
        prompt = self._prompt(inputs)
        return {"cold": self._first_token(prompt), "warm": self._first_token(prompt)}

    def _first_token(self, prompt: np.ndarray[Any, Any]) -> float:
        begin = time.perf_counter()
        handle = self._submit(prompt, 1)
        while not handle.can_read():
            self.pipeline.step()
        _drain(handle)
        return time.perf_counter() - begin

    def _prompt(self, tokens: int) -> np.ndarray[Any, Any]:
        return self.random.integers(10, 40_000, (1, tokens), dtype=np.int64)

    def _submit(self, prompt: np.ndarray[Any, Any], outputs: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = outputs, False, True
        config.set_eos_token_id(0)  # the pipeline needs one even where it is ignored
        self.requests += 1
        return self.pipeline.add_request(self.requests, ov.Tensor(prompt), config)


def _drain(handle: Any) -> int:
    count = 0
    while handle.can_read():
        count += sum(len(output.generated_ids) for output in handle.read().values())
    return count


def main() -> None:
    """Answers until standard input closes; `prefix N` asks for `Worker.prefix`."""
    asked = json.loads(sys.argv[1])
    worker = Worker(asked["model"], asked["properties"], asked["scheduler"])
    print(json.dumps({"load_seconds": worker.load_seconds}), flush=True)
    for line in sys.stdin:
        words = line.split()
        answer = worker.prefix(int(words[1])) if words[0] == "prefix" else worker.batch(*map(int, words))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
