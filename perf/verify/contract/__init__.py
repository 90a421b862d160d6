"""The conformance suite of docs/contract.md, for this project's engine models and NVIDIA's.

The quality and speed of answers are checked in the other parts of `verify/`.
"""

from llmops.perf.verify.contract import (
    cancellation,
    guided,
    kv_cache_reports,
    outputs,
    rejections,
    sampling,
    step_stream,
    stopping,
)
from llmops.perf.verify.findings import VerifyCheck

CHECKS: list[VerifyCheck] = [
    *outputs.CHECKS,
    *stopping.CHECKS,
    *cancellation.CHECKS,
    *sampling.CHECKS,
    *guided.CHECKS,
    *step_stream.CHECKS,
    *kv_cache_reports.CHECKS,
    *rejections.CHECKS,
]
