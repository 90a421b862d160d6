"""The conformance suite of docs/contract.md for any engine model: this project's or NVIDIA's.

Quality and speed of answers belong to the other parts of `verify/`.
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
