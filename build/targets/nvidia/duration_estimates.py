"""About how long each stage of a build takes: bytes over bandwidths and operations over rates.

Rough on purpose (a factor of two either way): whether to wait or to go home is the question. Rates: a third of the
dense bfloat16 peak of an H100 SXM (989 TFLOP/s, NVIDIA's datasheet), one GPU at a time, because each GPU holds some of
the layers; 40 GFLOP/s in float32 per CPU core; disks of 1 GB/s; 4 GB/s from the page cache to a GPU, 1 GB/s of 16-bit
numbers to float32 on a CPU.
"""

from __future__ import annotations

import os

from llmops.build.checkpoint.golden_prompts import TOKENS, golden_texts
from llmops.build.quantize.calibration import EVALUATION_LENGTH, bundled_texts
from llmops.build.quantize.memory_limits import CACHED_LAYERS_BYTES
from llmops.build.targets.nvidia.build_request import BuildRequest

_DISK, _TO_GPU, _ON_CPU = 1.0e9, 4e9, 1e9
_GPU_RATE, _CORE_RATE = 330e12, 40e9
# AWQ quantises and compares eleven times
_AWQ_PASSES = 12
_LIBRARIES = 20.0
# trtllm-build beside its files: graph, kernels, timing
_COMPILE = 120.0


class DurationEstimate:
    """Of one build; `stored` is the size of the quantised weights in bytes."""

    def __init__(self, request: BuildRequest, stored: int, gpu: bool) -> None:
        self.checkpoint, self.request, self.stored, self.gpu = request.checkpoint, request, stored, gpu
        self.rate = _GPU_RATE if gpu else _CORE_RATE * (os.cpu_count() or 1)

    def quantise(self) -> float:
        size, _ = self.request.calibration.resolved(self.gpu, self.request.form.calib_limit)
        tokens = size * self.request.calibration.seq_len if self.request.form.calibrated else 0
        passes = _AWQ_PASSES if self.request.form.grouped else 1
        seconds = (self.checkpoint.weight_bytes + self.stored) / _DISK + self._compute(tokens * passes)
        return (_LIBRARIES + seconds) / 60

    def gate(self) -> float:
        """The source once for the texts and once per token of the golden answers, the export once."""
        texts = len(bundled_texts("evaluation")) + len(golden_texts())
        reads = 1 + (TOKENS if self.checkpoint.parameters * 4 > CACHED_LAYERS_BYTES else 1)
        bandwidth = _TO_GPU if self.gpu else _ON_CPU
        traffic = (self.checkpoint.weight_bytes * reads + self.stored) / bandwidth
        first = (self.checkpoint.weight_bytes + self.stored) / _DISK
        return (traffic + first + self._compute(2 * texts * EVALUATION_LENGTH) * (4 if self.gpu else 1)) / 60

    def engine(self) -> float:
        """Every rank reads its file and writes its engine."""
        return (_COMPILE + 2 * self.stored / _DISK) / 60

    def _compute(self, tokens: int) -> float:
        """Seconds of forward passes over so many tokens."""
        return 2 * self.checkpoint.parameters * tokens / self.rate
