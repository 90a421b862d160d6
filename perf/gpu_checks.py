"""All checks that need a GPU, in one call: `python3 -m llmops.perf.gpu_checks ENGINE`.

Each step runs a command of llmops in a separate process, so that a step that crashes does not lose
the results of other steps. Each step writes its output into the report folder, and `summary.json`
there has the outcome of every step. On a machine without a GPU the same steps run, and the steps
that need a GPU fail.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.build.recipes.catalog import Recipe, find_recipe
from llmops.errors import LlmopsError
from llmops.process import module_command

#: Command line of this installation's `llmops`.
LLMOPS: tuple[str, ...] = tuple(module_command("llmops.cli"))
#: Seconds that loading an engine may take: the default of `llmops serve --ready-timeout`.
READY_TIMEOUT = 1800.0
#: Seconds that a server gets to end after SIGINT before it is killed: more than running answers and
#: the unloading of models take.
STOP_TIMEOUT = 120.0
#: Prompt and answer tokens of the benchmark if the recipe has no published figure: a usual point of
#: published benchmarks.
DEFAULT_LENGTHS = (1000, 1000)
#: Requests per user of the benchmark: enough for a steady state between warm-up and last answers.
REQUESTS_PER_USER = 4


@dataclass(frozen=True)
class StepResult:
    """The outcome of one step.

    Attributes:
        name: The name of the step.
        ok: True if the step succeeded.
        seconds: The duration.
        file: The name of the output file in the report folder.
        detail: A sentence about the result, or an empty text.
    """

    name: str
    ok: bool
    seconds: float
    file: str
    detail: str = ""


class GpuChecks:
    """The checks of one engine folder. Each step adds its outcome to `results`.

    Args:
        engine: The engine folder.
        report: The existing folder for outputs.
        source: The unquantised checkpoint of the engine, or an empty text.
        recipe: The recipe with the published throughput, or None.
        users: Number of concurrent users of the benchmark.
    """

    def __init__(self, engine: Path, report: Path, source: str, recipe: Recipe | None, users: int) -> None:
        self.engine, self.report, self.source, self.recipe, self.users = engine, report, source, recipe, users
        self.results: list[StepResult] = []

    def run(self) -> None:
        """Run every step, and write `summary.json`."""
        self._step("doctor", "doctor", "--json")
        self._step("deep doctor", "doctor", "--deep", "--json")
        if self.source:
            self._step("quantised layers", "eval", str(self.engine), "--against", self.source, "--json")
        page = self.report / "verify.html"
        self._step("verify", "verify", "--engine", str(self.engine), "--json", "--html", str(page))
        self._benchmark()
        content = [asdict(one) for one in self.results]
        (self.report / "summary.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _step(self, name: str, *arguments: str) -> bool:
        """Run a command of llmops to its end, and return True if it succeeded."""
        file = self.report / f"{name.replace(' ', '-')}.txt"
        begun = time.monotonic()
        with open(file, "wb") as output:
            done = subprocess.run([*LLMOPS, *arguments], stdout=output, stderr=subprocess.STDOUT, check=False)
        detail = "" if done.returncode == 0 else f"`llmops {' '.join(arguments)}` ended with code {done.returncode}"
        self._add(name, not detail, time.monotonic() - begun, file, detail)
        return not detail

    def _add(self, name: str, ok: bool, seconds: float, file: Path, detail: str) -> None:
        result = StepResult(name, ok, round(seconds, 1), file.name, detail)
        self.results.append(result)
        click.echo(f"{'ok' if ok else 'FAILED':7} {name:18} {result.seconds:8.1f} s  {file}  {detail}".rstrip())

    def _benchmark(self) -> None:
        """Serve the engine behind a gateway, run the benchmark, and compare with published figures."""
        port, log = _free_port(), self.report / "serve.txt"
        begun = time.monotonic()
        with open(log, "wb") as output:
            command = [*LLMOPS, "up", str(self.engine), "--port", str(port)]
            server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                ready = _wait_until_ready(server, port)
                detail = "" if ready else "the engine did not become ready; the end of the file says why"
                self._add("serve", ready, time.monotonic() - begun, log, detail)
                if ready and self._step("bench", "bench", f"http://127.0.0.1:{port}/v1", *self._load()):
                    self._compare()
            finally:
                _stop(server)

    def _load(self) -> Sequence[str]:
        published = self.recipe.published if self.recipe is not None else {}
        prompt, answer = published.get("isl", DEFAULT_LENGTHS[0]), published.get("osl", DEFAULT_LENGTHS[1])
        return (
            *("-c", str(self.users), "-n", str(REQUESTS_PER_USER * self.users)),
            *("-i", str(prompt), "-o", str(answer), "--json", str(self.report / "bench.json")),
        )

    def _compare(self) -> None:
        """Report the throughput per GPU, and its ratio to the published number if there is one."""
        file = self.report / "bench.json"
        rate = json.loads(file.read_text(encoding="utf-8"))["summary"]["output_tokens_per_second"]
        found = rate / EngineManifest.load(self.engine).parallelism.world_size
        detail = f"{found:,.0f} output tokens/s per GPU"
        if self.recipe is not None and self.recipe.published:
            published = self.recipe.published
            wanted = published["output_tokens_per_second_per_gpu"]
            detail += f", {found / wanted:.2f} of the published {wanted:,} ({published['measured_on']})"
        self._add("throughput", True, 0.0, file, detail)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _wait_until_ready(server: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until the gateway lists a model.

    Return False if the server ends or READY_TIMEOUT passes.
    """
    end = time.monotonic() + READY_TIMEOUT
    while server.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
                if json.load(answer).get("data"):
                    return True
        except (OSError, ValueError):
            pass
        time.sleep(1.0)
    return False


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End the server and all processes that it started."""
    if server.poll() is None:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@click.command(context_settings={"show_default": True})
@click.argument("engine", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--recipe", "name", help="Recipe whose published throughput the engine is compared with.")
@click.option(
    "--against",
    "source",
    default="",
    show_default=False,
    help="The unquantised checkpoint, whose layers the export is compared with.",
)
@click.option("-c", "--users", default=256, type=click.IntRange(1), help="Number of concurrent users of the benchmark.")
@click.option("-o", "--output", default=Path("gpu-report"), type=click.Path(path_type=Path))
def main(engine: Path, name: str | None, source: str, users: int, output: Path) -> None:
    """Run every check that needs a GPU on ENGINE, and write a report folder.

    The exit code is 1 if a step failed.
    """
    try:
        recipe = find_recipe(name) if name else None
        EngineManifest.load(engine)
    except LlmopsError as error:
        raise click.ClickException(error.message) from None
    output.mkdir(parents=True, exist_ok=True)
    checks = GpuChecks(engine, output, source, recipe, users)
    checks.run()
    sys.exit(not all(one.ok for one in checks.results))


if __name__ == "__main__":
    main()
