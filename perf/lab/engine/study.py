"""The bare engine with different weights and properties beside llama.cpp's server, in one run.

    python -m llmops.perf.lab.engine.study int8=ENGINE int4=ENGINE2 int8,INFERENCE_PRECISION_HINT=f32=ENGINE \\
        --gguf MODEL.gguf

Contenders take turns within each round, so that a ratio compares neighbours in time. How much of the machine other
processes took is printed with each round: where it is much, the rates mean little. Prompts are random tokens; nothing
is streamed from llama.cpp, which costs it least. An engine is an engine folder, or a folder with openvino_model.xml.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

import click

from llmops.errors import InputError
from llmops.model_repository.server.processes import with_parent_death_signal
from llmops.perf.lab.harness.processes import Others, cpu_seconds, descendants
from llmops.perf.lab.peers.llamacpp import llamacpp

INPUT_TOKENS = 64
OUTPUT_TOKENS = 64
PREFIX_TOKENS = 2_000
PEER = "llama.cpp"


@dataclass(frozen=True)
class Sample:
    """One batch. `others` is the CPU, in cores, that processes outside this study took meanwhile."""

    contender: str
    streams: int
    tokens: int
    seconds: float
    cpu_seconds: float
    others: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second, prompt processing included."""
        return self.tokens / self.seconds


class Contender(Protocol):
    """Something that generates; `run` gives (tokens, seconds)."""

    name: str
    pid: int

    def run(self, streams: int, output: int) -> tuple[int, float]: ...


class OpenVino:
    """The pipeline in a process of its own. `load_seconds`: until it could answer."""

    def __init__(self, name: str, model: Path, properties: dict[str, Any], stack: ExitStack) -> None:
        self.name = name
        own = {key.lower(): value for key, value in properties.items() if key.lower() in _SCHEDULER}
        rest = {key: value for key, value in properties.items() if key.lower() not in _SCHEDULER}
        asked = {"model": str(model), "properties": rest, "scheduler": own}
        self.process = _spawn([sys.executable, "-m", "llmops.perf.lab.engine.worker", json.dumps(asked)], stack)
        self.pid = self.process.pid
        self.load_seconds = float(self._answer()["load_seconds"])

    def run(self, streams: int, output: int) -> tuple[int, float]:
        answer = self._ask(f"{streams} {INPUT_TOKENS} {output}")
        return int(answer["tokens"]), answer["seconds"]

    def prefix(self) -> tuple[float, float]:
        """Seconds to the first token of a prompt of PREFIX_TOKENS, cold and warm."""
        answer = self._ask(f"prefix {PREFIX_TOKENS}")
        return answer["cold"], answer["warm"]

    def _ask(self, line: str) -> dict[str, float]:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        """The next line that is ours: libraries print to standard output too."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, float] = json.loads(line)
                return answer
        raise InputError(f"{self.name} ended (exit {self.process.wait()}): its settings do not work on this machine.")


_SCHEDULER = ("max_num_seqs", "max_num_batched_tokens", "num_kv_blocks", "enable_prefix_caching", "dynamic_split_fuse")


class LlamaServer:
    """llama.cpp's HTTP server; a request per stream, each answered as one JSON document."""

    name = PEER

    def __init__(self, gguf: Path, slots: int, stack: ExitStack) -> None:
        server = stack.enter_context(llamacpp(gguf, slots))
        self.pid, self.address = server.pid, server.address.removesuffix("/v1")
        self.random = Random(0)

    def run(self, streams: int, output: int) -> tuple[int, float]:
        bodies = [self._body(output) for _ in range(streams)]
        with ThreadPoolExecutor(streams) as pool:
            begin = time.perf_counter()
            tokens = sum(pool.map(self._post, bodies))
            return tokens, time.perf_counter() - begin

    def _body(self, output: int) -> bytes:
        prompt = [self.random.randrange(10, 40_000) for _ in range(INPUT_TOKENS)]
        sampling = {"temperature": 0, "samplers": [], "ignore_eos": True, "cache_prompt": False}
        return json.dumps({"prompt": prompt, "n_predict": output, **sampling}).encode()

    def _post(self, body: bytes) -> int:
        request = urllib.request.Request(f"{self.address}/completion", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as response:
            return int(json.loads(response.read())["tokens_predicted"])


def _spawn(command: list[str], stack: ExitStack) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        with_parent_death_signal(command), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def measure(contender: Contender, streams: int, output: int) -> Sample:
    """One batch, with what it and everything else on the machine used meanwhile."""
    pids, others = descendants(contender.pid), Others()
    own = cpu_seconds(pids)
    tokens, seconds = contender.run(streams, output)
    return Sample(contender.name, streams, tokens, seconds, cpu_seconds(pids) - own, others.cores())


def ratios(samples: list[Sample], name: str, streams: int, peer: str = PEER) -> list[float]:
    """Round by round, `name`'s rate over the peer's."""
    mine, theirs = (_rates(samples, who, streams) for who in (name, peer))
    return [a / b for a, b in zip(mine, theirs, strict=False)]


def _rates(samples: list[Sample], name: str, streams: int) -> list[float]:
    return [sample.rate for sample in samples if sample.contender == name and sample.streams == streams]


def table(samples: list[Sample], names: list[str], streams: list[int]) -> str:
    """Markdown: best rate, median in brackets, ratio to the peer (median over rounds), CPU per token, least."""
    head = "| |" + "".join(f" {count} streams | ratio | CPU ms/token |" for count in streams)
    rows = [head, "|---|" + "---|" * (3 * len(streams))]
    rows += [f"| {name} |" + "".join(_cells(samples, name, count) for count in streams) for name in names]
    return "\n".join(rows)


def _cells(samples: list[Sample], name: str, streams: int) -> str:
    rates, against = _rates(samples, name, streams), ratios(samples, name, streams)
    own = [s for s in samples if s.contender == name and s.streams == streams]
    cpu = min(1e3 * sample.cpu_seconds / sample.tokens for sample in own)
    ratio = f"{statistics.median(against):.2f}" if against else "–"
    return f" {max(rates):.0f} ({statistics.median(rates):.0f}) | {ratio} | {cpu:.2f} |"


def parse(entry: str) -> tuple[str, Path, dict[str, Any]]:
    """NAME=FOLDER or NAME,KEY=VALUE,…=FOLDER -> label, folder of the IR, properties. Raises InputError."""
    label, _, folder = entry.rpartition("=")
    path = Path(folder)
    model = path / "model" if (path / "engine.json").is_file() else path
    if not label or not (model / "openvino_model.xml").is_file():
        raise InputError(f"{entry!r} does not name an OpenVINO engine; write NAME=FOLDER or NAME,KEY=VALUE=FOLDER.")
    pairs = [part.partition("=")[::2] for part in label.split(",")[1:]]
    return label, model, {key: _value(value) for key, value in pairs}


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _rounds(contenders: list[Contender], streams: list[int], rounds: int, output: int) -> Iterator[list[Sample]]:
    """The samples of one round after the other."""
    for contender in contenders:
        contender.run(2, 4)  # the first batch chooses kernels and touches memory
    for _ in range(rounds):
        yield [measure(contender, count, output) for count in streams for contender in contenders]


@click.command()
@click.argument("engines", nargs=-1, required=True)
@click.option("--gguf", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The model for llama.cpp.")
@click.option("--streams", default="1,8,32", show_default=True, help="Batch sizes.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--output-tokens", default=OUTPUT_TOKENS, show_default=True, help="Tokens of each answer.")
@click.option("--prefix/--no-prefix", default=False, help="Also the time to first token of a 2,000-token prompt.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write every sample here.")
def main(
    engines: tuple[str, ...],
    gguf: Path | None,
    streams: str,
    rounds: int,
    output_tokens: int,
    prefix: bool,
    json_path: Path | None,
) -> None:
    """Compare ENGINES: NAME=FOLDER, or NAME,PROPERTY=VALUE,…=FOLDER."""
    counts = [int(count) for count in streams.split(",")]
    wanted = [parse(entry) for entry in engines]
    with ExitStack() as stack:
        own = [OpenVino(name, model, properties, stack) for name, model, properties in wanted]
        peers: list[Contender] = [LlamaServer(gguf, max(counts), stack)] if gguf else []
        print("\n".join(f"{engine.name}: loaded in {engine.load_seconds:.1f} s" for engine in own), flush=True)
        contenders = [*peers, *own]
        names, samples = [contender.name for contender in contenders], list[Sample]()
        for done, batch in enumerate(_rounds(contenders, counts, rounds, output_tokens), start=1):
            samples += batch
            print(f"\nround {done} of {rounds}; others took up to {max(s.others for s in batch):.2f} cores\n")
            print(table(samples, names, counts), flush=True)
            if json_path:
                json_path.write_text(json.dumps([asdict(sample) for sample in samples], indent=1) + "\n")
        if prefix:
            for engine in own:
                cold, warm = engine.prefix()
                print(
                    f"{engine.name}: {PREFIX_TOKENS} tokens cold {cold:.2f} s, again {warm:.3f} s ({warm / cold:.3f})"
                )


if __name__ == "__main__":
    main()
