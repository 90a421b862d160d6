"""A build reports its progress, the memory it needs, and the quality it lost."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from unittest.mock import Mock

import pytest

from llmops.build.checkpoint.golden_prompts import TOKENS
from llmops.build.engine_folder.manifest import EngineManifest, QualityMetrics, Quantisation
from llmops.build.engine_folder.manifest_extras import PytorchExtra
from llmops.build.job.build_engine import build
from llmops.build.progress import SilentProgress
from llmops.build.quality.quality_gates import QualityGates
from llmops.build.quant_formats import FORMATS
from llmops.build.quantize import model_loading, quantizer
from llmops.build.quantize.calibration import CalibrationSettings
from llmops.build.quantize.model_loading import has_gpu, load_model, load_tokenizer
from llmops.build.quantize.quantizer import quantize
from llmops.build.spec import BuildSpec
from llmops.build.targets.nvidia import nvidia_job, stage_estimates
from llmops.build.targets.nvidia.build_request import make_request
from llmops.build.targets.nvidia.stage_estimates import DurationEstimate, stage_needs
from llmops.cli.eval import quality_lines
from llmops.errors import BuildError, ResourceError
from tests.support.nvidia_smi import install_nvidia_smi


class CountingProgress(SilentProgress):
    """(title, total, amount that was advanced by) of every stage."""

    def __init__(self):
        super().__init__()
        self.stages = []

    @contextlib.contextmanager
    def stage(self, title, total=None):
        self.stages.append([title, total, 0.0])
        yield

    def advance(self, amount=1):
        self.stages[-1][2] += amount


@pytest.mark.parametrize(("quant", "group"), [("fp8", None), ("int4_awq", 32)])
def test_calibration_knows_how_much_is_left(checkpoint, quant, group):
    source, progress = checkpoint("llama"), CountingProgress()
    settings = CalibrationSettings(size=5, seq_len=48, batch_size=2)
    quantize(load_model(source), load_tokenizer(source), FORMATS[quant], "auto", group, settings, progress)
    ((title, total, advanced),) = progress.stages
    assert title == f"Calibrating {quant} on 5 sequences (240 tokens) of the bundled texts"
    assert advanced == pytest.approx(total)


def test_a_build_says_that_kernels_are_compiled_first(checkpoint, tmp_path, monkeypatch):
    from torch.utils import cpp_extension

    source, settings = checkpoint("llama"), CalibrationSettings(size=2, seq_len=48, batch_size=2)

    def notes(quant: str, group: int | None) -> list[str]:
        progress = SilentProgress()
        quantize(load_model(source), load_tokenizer(source), FORMATS[quant], "auto", group, settings, progress)
        return progress.notes

    monkeypatch.setattr(quantizer, "has_gpu", lambda: True)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "kept"))
    assert notes("int4_awq", 32) == []
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch(0o755)
    assert notes("int4_awq", 32) == [quantizer.COMPILING]
    assert notes("fp8", None) == []
    kept = tmp_path / "kept" / "py311_cu128" / quantizer.KERNELS
    kept.mkdir(parents=True)
    (kept / f"{quantizer.KERNELS}.so").touch()
    assert notes("int4_awq", 32) == []


def test_a_killed_build_holds_up_no_compilation(tmp_path, monkeypatch):
    """torch's lock of the kernels, whose process was killed."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "py312_cu130" / quantizer.KERNELS / "lock"
    lock.parent.mkdir(parents=True)
    with open(lock, "w"):
        os.utime(lock.parent, (0, 0))
        waiting = threading.Thread(target=quantizer._wait_for_other_build)
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
        assert lock.exists()
    waiting.join(60)
    assert not lock.exists()


@pytest.mark.parametrize("chosen", ["7", "GPU-7"])
def test_a_gpu_that_does_not_exist_is_no_reason_to_quantise_on_the_cpu(checkpoint, tmp_path, monkeypatch, chosen):
    install_nvidia_smi(monkeypatch, tmp_path)
    monkeypatch.setattr(model_loading, "has_gpu", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    words = {"target": "pytorch", "quant": "fp8"}
    with pytest.raises(ResourceError, match=f"^CUDA_VISIBLE_DEVICES={chosen} names no GPU; name one that"):
        build(BuildSpec(str(checkpoint("llama").path), tmp_path / "engine", **words))


@pytest.mark.parametrize("chosen", [None, "0"])
def test_an_old_driver_is_no_reason_to_quantise_on_the_cpu(checkpoint, tmp_path, monkeypatch, chosen):
    """torch for CUDA 13 has no GPU with a driver before 580, and only warns (`c10/cuda/CUDAFunctions.cpp`)."""
    install_nvidia_smi(monkeypatch, tmp_path, driver="550.163.01")
    monkeypatch.setattr(model_loading, "has_gpu", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    listed = Mock(wraps=nvidia_job.visible_gpus)
    monkeypatch.setattr(nvidia_job, "visible_gpus", listed)
    words = {"target": "pytorch", "quant": "fp8"}
    with pytest.raises(ResourceError, match=r"^torch \S+ cannot use the GPUs that `nvidia-smi -L` lists; update their"):
        build(BuildSpec(str(checkpoint("llama").path), tmp_path / "engine", **words))
    listed.assert_called_once()


@pytest.mark.parametrize(
    "says",
    [
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.81 GiB",
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_a_full_gpu_is_one_sentence(checkpoint, tmp_path, monkeypatch, says):
    import transformers

    def load(*_, **__):
        raise RuntimeError(says)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    words = {"target": "pytorch", "quant": "fp8", "options": {"quality": "false"}}
    with pytest.raises(ResourceError, match=r"^A GPU has no memory left; end the other processes on it"):
        build(BuildSpec(str(checkpoint("llama").path), tmp_path / "engine", **words))
    assert list(tmp_path.iterdir()) == []


def test_memory_that_other_programs_hold_is_not_there(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    # of a torch beside an H200 whose memory another process held
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (284164096, 150121021440))
    need = stage_estimates.StageRequirements("quality gate", 0, 2 << 30, 0, 0.0, here=True)
    with pytest.raises(ResourceError, match=r"about 2\.0 GiB of GPU memory, and 0\.3 GiB are free; end other"):
        stage_estimates.check_memory([need], gpu=True)


def test_libraries_say_nothing_while_they_load(tmp_path):
    """torch for CUDA, without a GPU: "No CUDA runtime is found, using CUDA_HOME='/usr/local/cuda'"."""
    (tmp_path / "modelopt" / "torch" / "quantization").mkdir(parents=True)
    for package in ("", "torch", "torch/quantization"):
        (tmp_path / "modelopt" / package / "__init__.py").touch()
    (tmp_path / "modelopt" / "torch" / "export.py").write_text("import logging; logging.warning('No CUDA runtime')")
    code = "from llmops.build.quantize.model_loading import import_libraries; import_libraries()"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# what the kernel says that the build took at most, and the models that are in memory when the export is read back.
# (getrusage would count the memory of the process that started it.)
BUILD = """
import gc, json, sys
import llmops.build.quality.reference_answers as reference
import llmops.build.quality.export_comparison as run
from llmops.cli.main import cli
measure, alive, texts = run.measure_export, [], reference.bundled_texts
reference.bundled_texts = lambda name: texts(name)[:2]

def watched(*arguments):
    from transformers import PreTrainedModel

    alive.extend(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, PreTrainedModel))
    return measure(*arguments)

run.measure_export = watched
cli(sys.argv[1:], standalone_mode=False)
line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"peak": 1024 * int(line.split()[1]), "alive": alive}))
"""
LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 2}


def test_a_build_takes_no_more_memory_than_it_says(checkpoint, tmp_path):
    pytest.importorskip("modelopt")
    source = checkpoint("llama", **LARGE)
    spec = BuildSpec(str(source.path), tmp_path / "engine", target="pytorch", quant="fp8", calib_size=2)
    said = stage_needs(make_request(spec, source), gpu=has_gpu())
    words = ["build", spec.checkpoint, "-o", str(spec.output), "--target", "pytorch", "--quant", "fp8"]
    # a random model has no preferences that quantising could keep
    words += ["--calib-size", "2", "--max-ppl-ratio", "9", "--min-top1", "0"]
    done = subprocess.run([sys.executable, "-c", BUILD, *words], capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["alive"] == []
    assert source.parameters * 4 < result["peak"] <= max(stage.ram for stage in said[:2])


def test_the_gate_reads_layers_again_only_where_a_gpu_cannot_keep_them(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(stage_estimates, "CACHED_LAYERS_BYTES", 0)  # as for a model far larger than that
    monkeypatch.setattr(os, "cpu_count", lambda: 64)  # whose arithmetic takes no time
    source = checkpoint("llama", **LARGE)
    fields = {"target": "pytorch", "quant": "fp8"}

    def minutes(gpu: str | None) -> float:
        spec = BuildSpec(str(source.path), tmp_path / "engine", gpu=gpu, **fields)
        return DurationEstimate(make_request(spec, source), 0, gpu=gpu is not None).gate()

    # two reads at 4 GB/s and one at 1 GB/s, instead of one for each token of the golden answers
    assert minutes("h100-sxm") * 60 < source.weight_bytes * 3 / 1e9
    assert minutes(None) * 60 > source.weight_bytes * TOKENS / 2e9


QUALITY = QualityMetrics(
    perplexity=19.487, perplexity_ratio=1.0332, top1_agreement=0.871, mean_kl=0.0584, worst_token_kl=5.582,
    golden_agreement=0.921, tokens=1163, prompts=8, weight_error=0.0289,
    weight_error_at="model.layers.3.mlp.up_proj.weight",
    narrowest=(0.79, "model.layers.1.mlp.down_proj"), widest=(1.75, "model.layers.2.self_attn.o_proj"),
)  # fmt: skip


def test_the_figures_are_shown_with_their_limits():
    gates = QualityGates(max_ppl_ratio=1.08, min_top1=0.81, max_mean_kl=0.1, max_weight_error=0.1)
    assert quality_lines(QUALITY, gates) == [
        "Against the source, on 1,163 tokens and 8 prompts:",
        "  perplexity         x1.0332        (at most x1.08)   19.49 with the source's weights",
        "  most likely token  87.1% same     (at least 81%)",
        "  mean KL            0.0584 nats    (at most 0.1)",
        "  worst token's KL   5.58 nats",
        "  answer tokens      92.1% same                       of the source's greedy answers to 8 prompts",
        "  furthest weight    2.89% off      (at most 10%)     model.layers.3.mlp.up_proj.weight",
        "  narrowest range    0.79 x reached (at least 0.2)    model.layers.1.mlp.down_proj",
        "  widest range       1.75 x reached (at most 32)      model.layers.2.self_attn.o_proj",
    ]


def test_an_engine_is_held_to_the_limits_that_it_was_built_with():
    manifest = EngineManifest.model_construct(
        extra=PytorchExtra(tensorrt_llm="1.2.1", llm_args={}, quality_limits={"min_top1": "0.5"}),
        quantisation=Quantisation(weights="fp8"),
    )
    worse = QUALITY.model_copy(update={"top1_agreement": 0.6})
    QualityGates.of_engine(manifest).check(worse)
    with pytest.raises(BuildError, match=r"top-1 agreement 0\.6 is under 0\.9 "):
        QualityGates.of_engine(manifest, {"min_top1": 0.9}).check(worse)


def test_smoothing_is_no_fault_but_swapped_shards_are():
    """SmolLM2-135M in INT8 SmoothQuant, as measured: an outlier makes one weight round coarsely."""
    gates = QualityGates.from_options({}, "int8_sq")
    smoothed = {"perplexity_ratio": 1.0874, "top1_agreement": 0.8005, "mean_kl": 0.1475, "weight_error": 0.4238}
    narrowest = (0.137, "model.layers.13.mlp.down_proj")
    found = QUALITY.model_copy(update={**smoothed, "narrowest": narrowest})
    gates.check(found)
    with pytest.raises(BuildError, match="differs by 131%"):
        gates.check(QualityMetrics(**{**found.model_dump(), "weight_error": 1.31}))
