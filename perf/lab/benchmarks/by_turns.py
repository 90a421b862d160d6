"""What a change costs on the hot path: `python -m llmops.perf.lab.benchmarks.by_turns ENGINE OTHER_LLMOPS`.

OTHER_LLMOPS is the `llmops` program of another environment, with another version. Its gateway and this one serve the
same load by turns, on one Triton with the mock engine; what counts is the ratio within a round: machines are noisy.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import click

from llmops.perf.lab.benchmarks.hot_path import PERIOD, answered, streamed
from llmops.perf.lab.harness.stack import Service, gateway
from llmops.perf.lab.mock_engine.served import served_mock_engine


def measure(server: Service, front: Service, streams: int, requests: int) -> tuple[float, float]:
    """Gateway CPU in µs per streamed token and ms per request."""
    used, tokens, _ = streamed(front.address, server, front, streams)
    return 1e6 * used["gateway"] / tokens, answered(front, requests)


@click.command()
@click.argument("engine", type=click.Path(path_type=Path, exists=True))
@click.argument("other", type=click.Path(path_type=Path, exists=True))
@click.option("--rounds", default=5, show_default=True)
@click.option("--streams", default=64, show_default=True)
@click.option("--requests", default=1000, show_default=True)
def main(engine: Path, other: Path, rounds: int, streams: int, requests: int) -> None:
    """This gateway against that of the OTHER llmops program: CPU per token and per request, ratios of each round."""
    ratios: list[tuple[float, float]] = []
    with served_mock_engine(engine, PERIOD) as server:
        for turn in range(rounds):
            figures = {}
            # the second one finds the machine as the first one left it
            for program in (None, other) if turn % 2 else (other, None):
                with gateway(server.address, program=program) as front:
                    figures[program] = measure(server, front, streams, requests)
            (token, request), (other_token, other_request) = figures[None], figures[other]
            ratios.append((token / other_token, request / other_request))
            click.echo(
                f"{token:.1f} against {other_token:.1f} µs/token ({ratios[-1][0]:.3f}), "
                f"{request:.3f} against {other_request:.3f} ms/request ({ratios[-1][1]:.3f})"
            )
    per_token, per_request = (statistics.median(column) for column in zip(*ratios, strict=True))
    click.echo(f"Median ratio per token {per_token:.3f}, per request {per_request:.3f}.")


if __name__ == "__main__":
    main()
