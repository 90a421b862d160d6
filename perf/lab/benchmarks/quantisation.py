"""Every recipe of the NVIDIA targets on one checkpoint: what it costs in answers, time and memory.

`python -m llmops.perf.lab.benchmarks.quantisation [RECIPE]… [--checkpoint smollm2] [--write docs/quantisation.md]`. A
recipe is TARGET/FORMAT or TARGET/FORMAT/KV-CACHE; without any, all. Figures are kept under .cache/bench/quantisation,
so that recipes can be measured one by one.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.build.quality.quality_gates import QualityGates, QualityMetrics
from llmops.build.quant_formats import FORMATS, buildable_formats
from llmops.build.target_facts import GPU_TARGETS
from llmops.errors import BuildError
from llmops.perf.lab.benchmarks.start_up import program, usage
from llmops.perf.lab.harness.processes import Others

RESULTS = Path(".cache/bench/quantisation")
BEGIN, END = "<!-- recipes -->", "<!-- end of recipes -->"
# so that a recipe that loses much is measured too; whether it meets the default limits is a column
OPEN = ("--max-ppl-ratio", "1e9", "--min-top1", "0", "--max-mean-kl", "1e9")
# all formats are measured with a cache of 16 bits; these also with another
WITH_KV_CACHE = ("pytorch/none/fp8", "tensorrt/none/int8", "tensorrt/fp8/fp8")
HEADER = ("", "weights", "perplexity", "top-1", "mean KL", "worst token", "one weight", "wall", "CPU", "others", "peak",
          "limits")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One recipe. `size` and `peak` in bytes, times in seconds; `quality` as in engine.json; `others` is how many cores
    other processes used meanwhile."""

    recipe: str
    size: int
    wall: float
    cpu: float
    peak: int
    quality: dict[str, Any]
    when: str
    others: float

    @property
    def within_limits(self) -> bool:
        """Whether `llmops build` lets it through with its default limits."""
        try:
            _, form, kv_cache = split(self.recipe)
            QualityGates.from_options({}, form, kv_cache).check(QualityMetrics(**self.quality))
        except BuildError:
            return False
        return True

    def cells(self) -> tuple[str, ...]:
        found = QualityMetrics(**self.quality)
        return (
            f"`{self.recipe}`", f"{self.size / 1e6:.0f} MB", f"× {found.perplexity_ratio:.4f}",
            f"{found.top1_agreement:.1%}", f"{found.mean_kl:.4f}", f"{found.worst_token_kl:.2f}",
            f"{found.weight_error or 0:.1%}", f"{self.wall:.0f} s", f"{self.cpu:.0f} s",
            f"{self.others:.1f}", f"{self.peak / 1e9:.2f} GB",
            "kept" if self.within_limits else "**broken**",
        )  # fmt: skip


def recipes() -> list[str]:
    """In the order of the table."""
    plain = [
        f"{target}/{name}" for name in FORMATS for target in sorted(GPU_TARGETS) if name in buildable_formats(target)
    ]
    return [*plain, *WITH_KV_CACHE]


def split(recipe: str) -> tuple[str, str, str]:
    """(target, format, precision of the KV cache)."""
    target, form, *kv_cache = recipe.split("/")
    return target, form, kv_cache[0] if kv_cache else "auto"


def measure(recipe: str, checkpoint: str) -> Row:
    """A cold build in a process of its own. Raises CalledProcessError when it fails."""
    target, form, kv_cache = split(recipe)
    with tempfile.TemporaryDirectory() as name:
        engine = Path(name) / "engine"
        words = ["build", checkpoint, "-o", str(engine), "--target", target, "--quant", form]
        words += ["--kv-cache", kv_cache, *OPEN]
        others = Others()
        used = usage([program(), *words], Path(name) / "cache")
        cores = round(others.cores(), 2)
        quality = EngineManifest.load(engine).quality
        size = sum(file.stat().st_size for file in engine.rglob("*.safetensors"))
    assert quality is not None
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    return Row(recipe, size, used.seconds, used.cpu, int(used.peak_mib * 2**20), quality, when, cores)


def kept() -> list[Row]:
    """What was measured last, in the order of the table."""
    files = [_file(recipe) for recipe in recipes()]
    return [Row(**json.loads(file.read_text())) for file in files if file.is_file()]


def table(rows: Iterable[Row]) -> str:
    """Markdown."""
    lines = [HEADER, ("---",) * len(HEADER), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write(page: Path, text: str) -> None:
    """Put `text` between the two comments of the page. Raises ValueError where they are missing."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{page} has no {BEGIN} … {END}")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def _file(recipe: str) -> Path:
    return RESULTS / f"{recipe.replace('/', '-')}.json"


@click.command()
@click.argument("chosen", nargs=-1, metavar="[RECIPE]...")
@click.option("--checkpoint", default="smollm2", show_default=True)
@click.option("--write", "page", type=click.Path(exists=True, path_type=Path), help="Put the table into this page.")
@click.option("--only-write", is_flag=True, help="Measure nothing; the table of what was measured before.")
def main(chosen: tuple[str, ...], checkpoint: str, page: Path | None, only_write: bool) -> None:
    """Measure each RECIPE (TARGET/FORMAT; default all) and print the table."""
    unknown = set(chosen) - set(recipes())
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(recipes())}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    for recipe in () if only_write else chosen or recipes():
        row = measure(recipe, checkpoint)
        _file(recipe).write_text(json.dumps(asdict(row), indent=1) + "\n")
        click.echo(f"| {' | '.join(row.cells())} |")
    text = table(kept())
    click.echo(text)
    if page:
        write(page, text)


if __name__ == "__main__":
    main()
