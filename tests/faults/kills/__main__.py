"""Kills of replicas under streams, on the real Triton: `python -m tests.faults.kills ENGINE`.

With the mock engine (64 streams, exact) or with the engine in ENGINE itself (`--real`): each text is compared with the
answer to the same question from before the faults.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
from pathlib import Path

import click

from llmops.model_repository.generate import generate_repository, read_engines
from llmops.perf.lab.figures import Section
from tests.faults.kills.replicas import Pair, pair
from tests.faults.kills.rounds import Fault, Seen, killed, restarted, rounds, stopped
from tests.faults.kills.streams import Question, reference
from tests.support.mock_engine.planned import constant
from tests.support.mock_engine.repository import make_mock_engine

# seconds per step of the mock engine, and per prompt token
STEP, PER_PROMPT_TOKEN = 0.03, 0.00005
BLOCKS = 8192


def repositories(engine: Path, folder: Path, real: bool, count: int = 2) -> tuple[list[Path], str]:
    """Make `count` identical repositories; return them and the name of their model."""
    paths = [folder / f"replica-{at}" for at in range(count)]
    for path in paths:
        if real:
            generate_repository(read_engines([f"real={engine}"]), path)
        else:
            make_mock_engine(engine, path, paged=constant(STEP, PER_PROMPT_TOKEN, BLOCKS))
    return paths, "real" if real else "mock"


def questions(model: str, streams: int, tokens: int) -> list[Question]:
    """All different, so that an answer that goes to the wrong client is noticed."""
    return [Question(model, f"Story number {at}, told slowly. Once upon a time", tokens) for at in range(streams)]


@click.command()
@click.argument("engine", type=click.Path(path_type=Path, exists=True))
@click.option("--real", is_flag=True, help="Serve ENGINE itself, not the mock engine with its tokenizer.")
@click.option("--kills", default=100, show_default=True, help="How often a replica gets SIGKILL.")
@click.option("--stops", default=3, show_default=True, help="How often one gets SIGSTOP.")
@click.option("--restarts", default=4, show_default=True, help="How often one is restarted with SIGTERM.")
@click.option("--minutes", type=float, default=math.inf, help="Of each fault at most.  [default: no limit]")
@click.option("--streams", default=64, show_default=True)
@click.option("--tokens", default=150, show_default=True, help="Of each answer.")
def main(
    engine: Path, real: bool, kills: int, stops: int, restarts: int, minutes: float, streams: int, tokens: int
) -> None:
    """Figures of every fault, one after the other on the same two replicas."""
    what = "the engine itself" if real else "the mock engine"
    text = f"{streams} streams of {tokens} tokens, two replicas on the real Triton, {what}."
    section = Section("Replicas that die", text)
    with section, tempfile.TemporaryDirectory() as place:
        paths, model = repositories(engine, Path(place), real)
        asked = questions(model, streams, tokens)
        with pair(paths, Path(place)) as both:
            times: dict[Fault, int] = {killed: kills, stopped: stops, restarted: restarts}
            asyncio.run(_measure(section, both, asked, times, 60 * minutes, 0.0 if real else PER_PROMPT_TOKEN))


async def _measure(
    section: Section, both: Pair, asked: list[Question], times: dict[Fault, int], seconds: float, per_token: float
) -> None:
    """`per_token`: what reading a token of a prompt takes (s), 0 where that is not known."""
    await both.all_ready()
    right = await reference(both.url, asked)
    section.add("the longest pause while nothing is wrong, p95", _p95([one.pause() for one in right.values()]), "s")
    for fault, count in times.items():
        if count:
            _add(section, fault.__name__, await rounds(both, fault, count, right, seconds=seconds), per_token)


def _add(section: Section, fault: str, seen: Seen, per_token: float) -> None:
    name = f"{seen.times} x {fault}"
    if seen.trouble:
        section.note(f"{name}: no more of them, as {seen.trouble}")
    section.add(f"{name}: answers", seen.answers, "")
    section.add(f"{name}: answers that failed", len(seen.failed), "", 0)
    section.add(f"{name}: answers with another text or bill", len(seen.different), "", 0)
    section.add(f"{name}: answers that went on elsewhere", len(seen.pauses), "")
    if seen.pauses:
        aim = 6.0 if fault == "stopped" else None
        section.add(f"{name}: their longest pause, median", statistics.median(seen.pauses), "s")
        section.add(f"{name}: their longest pause, p95", _p95(seen.pauses), "s", aim)
        section.add(f"{name}: their longest pause, worst", max(seen.pauses), "s")
        _add_reading(section, name, seen, per_token if fault == "killed" else 0.0)
    if seen.drains:
        section.add(f"{name}: from SIGTERM to the end, worst", max(seen.drains), "s")
    section.note(f"{name}: moves {seen.moves or 'none'}, seams {dict(seen.splices) or 'none'}.")
    for error in seen.failed[:3]:
        section.note(f"{name}: failed with {error[:200]}")
    for question, told in seen.different[:3]:
        section.note(
            f"{name}: different: {question.prompt[:20]!r}: {told.completion_tokens} tokens, {told.text[-60:]!r}"
        )


def _add_reading(section: Section, name: str, seen: Seen, per_token: float) -> None:
    """Add the part of the pauses in which prompts and answers are read again.

    All sequences of a round are read at once.
    """
    section.add(f"{name}: tokens that are read again in a round, median", statistics.median(seen.reread), "")
    if per_token:
        reading = [per_token * tokens for tokens in seen.reread]
        rest = [pause - one for pause, one in zip(seen.pauses, reading, strict=True)]
        section.add(f"{name}: … which takes the engine, median", statistics.median(reading), "s")
        section.add(f"{name}: their longest pause without that, p95", _p95(rest), "s", 0.5)


def _p95(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))] if values else 0.0


if __name__ == "__main__":
    main()
