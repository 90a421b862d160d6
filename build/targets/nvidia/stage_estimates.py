"""Estimate memory, disk space and time per build stage, before a build starts.

Times are rough (right within a factor of two): bytes divided by bandwidths, and operations divided
by rates. Rates: a third of the dense bfloat16 peak of an H100 SXM (989 TFLOP/s, NVIDIA's
datasheet), one GPU at a time, because each GPU holds some of the layers; 40 GFLOP/s in float32 per
CPU core; disks of 1 GB/s; 4 GB/s from the page cache to a GPU, 1 GB/s of 16-bit numbers to float32
on a CPU.
"""

import math
import os

from llmops.build.checkpoint import Checkpoint
from llmops.build.checkpoint.golden_prompts import TOKENS, golden_texts
from llmops.build.environment import available_memory
from llmops.build.model.architecture import Architecture
from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.quantize.calibration import CACHED_LAYERS_BYTES, CACHED_TABLE_BYTES, EVALUATION_LENGTH, bundled_texts
from llmops.build.spec import BuildSpec
from llmops.build.targets.build_target import StageRequirements
from llmops.build.targets.nvidia.build_request import BuildRequest
from llmops.errors import ResourceError

_GIB = 2**30
#: Bytes of the tokenizer and the configuration files of an engine: an upper bound.
OTHER_FILES = 64 * 2**20
#: Memory on a CPU as a multiple of the weights in float32, measured with SmolLM2-135M and, in FP8, a
#: Llama of 380 million parameters (docs/quantisation.md).
_CPU_FACTOR = 2.0
#: Bytes of torch, transformers and ModelOpt on a CPU. torch's builds for CUDA take more.
_CPU_FIXED = int(0.9 * _GIB)
#: Bytes of the libraries and CUDA's context in a process that uses a GPU. A tiny model on an H100
#: took 1.95 GB.
_GPU_PROCESS = int(2.25 * _GIB)
#: Bytes of small layers and tables that the quality gate keeps in memory.
_GATE_KEPT = CACHED_LAYERS_BYTES + 2 * CACHED_TABLE_BYTES
#: Number of layers that the quality gate holds at once: the layer in use, and the next.
_GATE_LAYERS = 2
#: Number of copies of one evaluation text's logits in float32, such as logits and logarithms of
#: source and export.
_LOGITS = 5
#: GPU memory as a multiple of the 16-bit weights: an estimate.
_GPU_FACTOR = 1.3
#: Bytes of GPU memory for activations, allocator and CUDA context: an estimate.
_GPU_FIXED = 2 * _GIB


def stored_bytes(request: BuildRequest) -> int:
    """Return the bytes of the quantised weights with scales.

    Embedding and output matrix stay in 16 bits.
    """
    checkpoint, arch = request.checkpoint, request.checkpoint.architecture
    if request.is_prequantized:
        return checkpoint.weight_bytes
    table = arch.vocab_size * arch.hidden_size
    narrow = max(0, checkpoint.parameters - table * (1 if arch.tie_word_embeddings else 2))
    scales = narrow * 4 // request.group_size if request.group_size else 0
    bits = 16 if request.quant_format.preset is None else request.quant_format.bits
    return table * (1 if _one_table(arch, request.spec.target) else 2) * 2 + narrow * bits // 8 + scales


def _one_table(arch: Architecture, target: str) -> bool:
    """Return True if the export stores embedding and output matrix as one matrix.

    TensorRT-LLM's checkpoints store one matrix only for Gemma.
    """
    return arch.tie_word_embeddings and (target != "tensorrt" or arch.family in ("gemma2", "gemma3"))


def stage_needs(request: BuildRequest, gpu: bool) -> list[StageRequirements]:
    """Return the requirements of each stage, in the order of the build.

    `gpu` is True if quantising runs on GPUs.
    """
    spec, checkpoint = request.spec, request.checkpoint
    stored, full = stored_bytes(request), checkpoint.parameters * 4
    logits = _LOGITS * EVALUATION_LENGTH * checkpoint.architecture.vocab_size * 4
    time, stages = DurationEstimate(request, stored, gpu), []
    process = _GPU_PROCESS if gpu else _CPU_FIXED
    if not request.exports_unchanged:
        on_gpu = math.ceil(checkpoint.parameters * 2 * _GPU_FACTOR) + _GPU_FIXED if gpu else 0
        buffers = max(logits, _activations(request))
        ram = process + (stored * 2 if gpu else int(full * _CPU_FACTOR) + buffers)
        stages.append(StageRequirements("quantise and export", ram, on_gpu, stored, time.quantise(), here=True))
    if request.measure_quality:
        held = min(_layer_bytes(checkpoint) * _GATE_LAYERS + _GATE_KEPT, 2 * full) + _states(checkpoint) + logits
        on_gpu = held + _GPU_FIXED if gpu else 0
        stages.append(
            StageRequirements(
                "quality gate", held + process, on_gpu, recorded_bytes(checkpoint), time.gate(), here=True
            )
        )
    if spec.target == "tensorrt":
        # Every worker holds the weights of its rank and the engine that it builds from them.
        title = f"trtllm-build, {spec.tp * spec.pp} ranks" if spec.tp * spec.pp > 1 else "trtllm-build"
        stages.append(StageRequirements(title, stored * 2, stored + _GPU_FIXED, stored, time.engine()))
    stages.append(StageRequirements("serving, weights only", stored, stored, 0))
    return stages


def _layer_bytes(checkpoint: Checkpoint) -> int:
    """Return the mean size of a decoder layer in float32, in bytes."""
    arch = checkpoint.architecture
    return checkpoint.parameters * 4 // arch.num_layers


def _states(checkpoint: Checkpoint) -> int:
    """Return the bytes of the hidden states of the texts, in float32.

    The states of all texts between two layers count twice, and the states of one text inside a
    layer once.
    """
    arch, texts = checkpoint.architecture, len(bundled_texts("evaluation")) + len(golden_texts())
    within = EVALUATION_LENGTH * (8 * arch.hidden_size + 4 * arch.intermediate_size)
    return (2 * texts * EVALUATION_LENGTH * arch.hidden_size + within) * 4


def recorded_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of the quality gate's record of the source model.

    The record has log-probabilities of all texts, and eight numbers per row of each weight.
    """
    arch = checkpoint.architecture
    texts = len(bundled_texts("evaluation"))
    return texts * EVALUATION_LENGTH * arch.vocab_size * 4 + checkpoint.parameters // arch.hidden_size * 8 * 4


def _activations(request: BuildRequest) -> int:
    """Return the bytes of one layer's activations for one calibration batch in float32."""
    arch, settings = request.checkpoint.architecture, request.calibration
    _, batch = settings.resolved(False, request.quant_format.calib_limit)
    return batch * settings.seq_len * (4 * arch.hidden_size + 3 * arch.intermediate_size) * 4


def check_memory(stages: list[StageRequirements], gpu: bool) -> None:
    """Raise ResourceError for the first stage that needs more memory than this machine has."""
    available = available_memory()
    for need in (stage for stage in stages if stage.here):
        if available is not None and need.ram > available:
            raise ResourceError(
                f"The stage {need.stage!r} needs about {need.ram / _GIB:.1f} GiB of memory, and "
                f"{available / _GIB:.1f} GiB are available; use a machine with more memory or with GPUs."
            )
        if gpu and need.gpu > gpu_memory():
            raise ResourceError(
                f"The stage {need.stage!r} needs about {need.gpu / _GIB:.1f} GiB of GPU memory, and "
                f"{gpu_memory() / _GIB:.1f} GiB are free; end other processes on the GPUs, or use more GPUs."
            )


def planned_on_gpu(spec: BuildSpec) -> bool:
    """Return True if the quantisation is planned on GPUs, of --gpu or of this machine."""
    if spec.gpu is not None:
        return True
    try:
        from llmops.build.quantize.model_loading import has_gpu

        return has_gpu()
    except ImportError:
        return False


def gpu_memory() -> int:
    """Return the free memory of all GPUs in bytes."""
    import torch

    from llmops.build.quantize.model_loading import report_full_gpu

    with report_full_gpu():
        return sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))


#: Bytes per second from a disk.
_DISK = 1.0e9
#: Bytes per second from the page cache to a GPU.
_TO_GPU = 4e9
#: Bytes per second of 16-bit numbers that a CPU converts to float32.
_ON_CPU = 1e9
#: Operations per second of a GPU: a third of an H100 SXM's dense bfloat16 peak.
_GPU_RATE = 330e12
#: Operations per second of a CPU core in float32.
_CORE_RATE = 40e9
#: Number of forward passes of AWQ, which quantises and compares eleven times.
_AWQ_PASSES = 12
#: Seconds in which the libraries are imported.
_LIBRARIES = 20.0
#: Seconds of trtllm-build besides reading and writing: graph, kernels and their timing.
_COMPILE = 120.0


class DurationEstimate:
    """An estimate of the duration of one build's stages.

    `stored` is the size of the quantised weights in bytes.
    """

    def __init__(self, request: BuildRequest, stored: int, gpu: bool) -> None:
        self.checkpoint, self.request, self.stored, self.gpu = request.checkpoint, request, stored, gpu
        self.rate = _GPU_RATE if gpu else _CORE_RATE * (os.cpu_count() or 1)

    def quantise(self) -> float:
        """Return the minutes of quantisation and export."""
        size, _ = self.request.calibration.resolved(self.gpu, self.request.quant_format.calib_limit)
        tokens = size * self.request.calibration.seq_len if self.request.quant_format.calibrated else 0
        passes = _AWQ_PASSES if self.request.quant_format.grouped else 1
        seconds = (self.checkpoint.weight_bytes + self.stored) / _DISK + self._compute(tokens * passes)
        return (_LIBRARIES + seconds) / 60

    def gate(self) -> float:
        """Return the minutes of the quality gate.

        The gate reads the source once for the texts. For each token of the golden answers, the gate
        reads again the layers that did not fit in memory. The gate reads the export once.
        """
        texts = len(bundled_texts("evaluation")) + len(golden_texts())
        kept = min(1.0, self._bytes_to_keep() / max(1, self.checkpoint.parameters * 4))
        reads = 1 + kept + TOKENS * (1 - kept)
        bandwidth = _TO_GPU if self.gpu else _ON_CPU
        traffic = (self.checkpoint.weight_bytes * reads + self.stored) / bandwidth
        first = (self.checkpoint.weight_bytes + self.stored) / _DISK
        return (traffic + first + self._compute(2 * texts * EVALUATION_LENGTH) * (4 if self.gpu else 1)) / 60

    def _bytes_to_keep(self) -> int:
        """Return the bytes of float32 weights that the quality gate keeps instead of reading again.

        The result is half of the GPU's memory, or CACHED_LAYERS_BYTES on a CPU. If --gpu is not
        given and this machine has no GPU, the memory of an H100 SXM is used.
        """
        if not self.gpu:
            return CACHED_LAYERS_BYTES
        if self.request.spec.gpu is None and planned_on_gpu(self.request.spec):
            import torch

            return int(torch.cuda.get_device_properties(0).total_memory) // 2
        return find_gpu(self.request.spec.gpu or "h100-sxm").memory // 2

    def engine(self) -> float:
        """Return the minutes of trtllm-build: every rank reads its file and writes its engine."""
        return (_COMPILE + 2 * self.stored / _DISK) / 60

    def _compute(self, tokens: int) -> float:
        """Return the seconds of forward passes over `tokens` tokens."""
        return 2 * self.checkpoint.parameters * tokens / self.rate
