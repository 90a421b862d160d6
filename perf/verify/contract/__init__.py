"""The conformance suite of docs/contract.md, for any engine model: ours or NVIDIA's.

Whether answers are good or fast belongs to the other parts of `verify/`.
"""

from llmops.perf.verify.base import Check
from llmops.perf.verify.contract import endings, guided, leaving, outputs, refusals, sampling, state, steps

CHECKS: list[Check] = [
    *outputs.CHECKS,
    *endings.CHECKS,
    *leaving.CHECKS,
    *sampling.CHECKS,
    *guided.CHECKS,
    *steps.CHECKS,
    *state.CHECKS,
    *refusals.CHECKS,
]
