"""Report the progress of a model's forward passes, layer by layer."""

import contextlib
from collections.abc import Iterator
from typing import Any

from llmops.build.progress import Progress

#: Number of tokens whose computation takes about as long as one read of all weights, on a CPU.
PASS = 16


def forward_cost(lengths: list[int]) -> int:
    """Return the progress units of forward passes over the given numbers of tokens.

    All sequences of a batch run together.
    """
    return sum(lengths) + PASS * len(lengths)


class ForwardMeter:
    """A mutable factor by which the progress of the next forward passes is multiplied."""

    def __init__(self) -> None:
        self.cost = 1.0


@contextlib.contextmanager
def layer_progress(model: Any, progress: Progress) -> Iterator[ForwardMeter]:
    """Advance `progress` after each decoder layer, while the block is open.

    Each layer adds its part of `forward_cost`.
    """
    layers, meter = model.get_decoder().layers, ForwardMeter()

    def advance(module: Any, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        tokens = hidden.numel() // hidden.shape[-1]
        progress.advance(meter.cost * forward_cost([tokens]) / len(layers))

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(advance))
        yield meter
