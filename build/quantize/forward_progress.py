"""A progress bar that moves while a model runs: layer by layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmops.build.progress import Progress

# Reading all weights once takes about as long as computing this many tokens with them, on a CPU.
PASS = 16


def forward_cost(lengths: list[int]) -> int:
    """What passes over so many tokens each (all sequences of a batch together) amount to, in `advance`'s units."""
    return sum(lengths) + PASS * len(lengths)


class ForwardMeter:
    """`cost` weighs the passes that follow."""

    def __init__(self) -> None:
        self.cost = 1.0


@contextlib.contextmanager
def layer_progress(model: Any, progress: Progress) -> Iterator[ForwardMeter]:
    """While it is open, each decoder layer that has run advances `progress` by its share of `work`."""
    layers, meter = model.get_decoder().layers, ForwardMeter()

    def advance(module: Any, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        tokens = hidden.numel() // hidden.shape[-1]
        progress.advance(meter.cost * forward_cost([tokens]) / len(layers))

    handles = [layer.register_forward_hook(advance) for layer in layers]
    try:
        yield meter
    finally:
        for handle in handles:
            handle.remove()
