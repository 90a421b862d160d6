"""The engine without a server: a program around OpenVINO GenAI's ContinuousBatchingPipeline.

The program reads lines `CONCURRENCY REQUESTS INPUT OUTPUT` from standard input, and answers each
line with the output tokens/s of a closed loop with CONCURRENCY requests in flight. Prompts are
random, and answers are not detokenised. The pipeline has the settings of the engine model.
"""

import atexit
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


class Bare:
    """A pipeline of OpenVINO GenAI with one loaded engine folder."""

    def __init__(self, engine: Path) -> None:
        import openvino_genai

        self._genai = openvino_genai
        self._pipeline, self._vocabulary = _pipeline(engine)
        self._next = 0
        self._rng = random.Random(0)

    def run(self, concurrency: int, requests: int, input_: int, output: int) -> float:
        """Return the output tokens per second of a closed loop.

        Args:
            concurrency: The number of sequences that run at the same time.
            requests: The number of requests in total.
            input_: The number of tokens of each prompt.
            output: The number of tokens of each answer.
        """
        running: list[Any] = []
        tokens, left = 0, requests
        begun = time.perf_counter()
        while running or left:
            while left and len(running) < concurrency:
                running.append(self._add(input_, output))
                left -= 1
            self._pipeline.step()
            tokens += sum(_read(handle) for handle in running)
            running = [handle for handle in running if not self._done(handle)]
        return tokens / (time.perf_counter() - begun)

    def _add(self, input_: int, output: int) -> Any:
        import numpy as np
        import openvino as ov

        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = output, True
        ids = np.array([self._rng.choices(range(100, self._vocabulary), k=input_)], dtype=np.int64)
        self._next += 1
        return self._pipeline.add_request(self._next, ov.Tensor(ids), config)

    def _done(self, handle: Any) -> bool:
        finished: bool = handle.get_status() != self._genai.GenerationStatus.RUNNING and not handle.can_read()
        return finished


def _read(handle: Any) -> int:
    if not handle.can_read():
        return 0
    return sum(len(output.generated_ids) for output in handle.read().values())


def _pipeline(engine: Path) -> tuple[Any, int]:
    """Return a pipeline that the engine model's runtime builds, so that both have equal settings."""
    from llmops.build.engine_folder.manifest import EngineManifest
    from llmops.model_repository.generate import copy_model_code, model_metadata, read_engines

    models = Path(tempfile.mkdtemp(prefix="llmops-engine-"))
    atexit.register(shutil.rmtree, models, ignore_errors=True)
    copy_model_code("tensorrt_llm", models)
    sys.path.insert(0, str(models))
    from llmops_engine.runtimes.choose import create_runtime

    (entry,) = read_engines([str(engine)])
    parameters = entry.target.engine_model(entry.directory, entry.manifest).parameters
    runtime = create_runtime(parameters, model_metadata(entry))
    return runtime._pipeline, EngineManifest.load(engine).tokenizer.vocab_size


def main() -> None:
    """Answer each line of standard input, until the input ends."""
    bare = Bare(Path(sys.argv[1]))
    print("ready bare", flush=True)
    for line in sys.stdin:
        print(json.dumps(bare.run(*map(int, line.split()))), flush=True)


if __name__ == "__main__":
    main()
