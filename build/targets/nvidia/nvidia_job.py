"""The common base of the NVIDIA targets' jobs.

ModelOpt quantises on this machine, and the engine runs elsewhere.
"""

import os
import shutil
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from llmops.build.checkpoint.file_checks import reject_changed_files
from llmops.build.checkpoint.lora_adapters import CONFIG, WEIGHTS, AdapterCheckpoint
from llmops.build.engine_folder.manifest_extras import AdapterEntry, NvidiaExtra
from llmops.build.environment import installed_version, visible_gpus
from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.targets.build_target import HEADER, BuildResult, GeneratorJob, StageRequirements
from llmops.build.targets.nvidia.build_request import BuildRequest
from llmops.build.targets.nvidia.quantize_stages import kept_bytes, library_versions
from llmops.build.targets.nvidia.stage_estimates import (
    OTHER_FILES,
    check_memory,
    planned_on_gpu,
    recorded_bytes,
    stage_needs,
    stored_bytes,
)
from llmops.build.trtllm.container_images import OWN_TAG
from llmops.build.trtllm.image_selection import release_of
from llmops.errors import InputError, ResourceError


class NvidiaJob(GeneratorJob):
    """A build job of an NVIDIA target. The build writes the weights `copies` times."""

    copies = 1

    def __init__(self, request: BuildRequest, adapters: list[AdapterCheckpoint]) -> None:
        super().__init__(request.spec, request.checkpoint)
        _check_output_adapters(request, adapters)
        self.request, self.adapters = request, adapters

    @property
    def adapter_entries(self) -> list[AdapterEntry]:
        """Return the LoRA adapters, for engine.json."""
        return [AdapterEntry(name=one.name, id=one.task_id) for one in self.adapters]

    @cached_property
    def versions(self) -> dict[str, str]:
        return library_versions()

    def reject_changed_inputs(self) -> None:
        super().reject_changed_inputs()
        for adapter in self.adapters:
            reject_changed_files(adapter.folder, adapter.states, dict.fromkeys((CONFIG, WEIGHTS)))

    @property
    def disk_bytes(self) -> int:
        recorded = recorded_bytes(self.checkpoint) if self.request.measure_quality else 0
        return self.copies * stored_bytes(self.request) + recorded + OTHER_FILES

    @property
    def kept_bytes(self) -> int:
        return kept_bytes(self.request)

    @cached_property
    def stage_requirements(self) -> Sequence[StageRequirements]:
        return stage_needs(self.request, planned_on_gpu(self.spec) and not self.request.exports_unchanged)

    @property
    def dry_run_lines(self) -> list[str]:
        commands = [line for part in self.commands() for line in (part, "")]
        table = [HEADER, *(stage.line() for stage in self.stage_requirements), *self._too_large_lines()]
        return [*self._quantisation_lines(), "", *table, "", *commands]

    @abstractmethod
    def commands(self) -> list[str]:
        """Return the commands that build or start the engine, as lines for the terminal."""

    def check(self) -> None:
        if not self.request.exports_unchanged:
            from llmops.build.quantize.model_loading import has_gpu, require_quantize_extra

            require_quantize_extra()
            gpu, chosen = has_gpu(), os.environ.get("CUDA_VISIBLE_DEVICES", "")
            visible = visible_gpus() if chosen or not gpu else None
            if chosen not in ("", "-1", "NoDevFiles") and not visible:
                raise ResourceError(
                    f"CUDA_VISIBLE_DEVICES={chosen} names no GPU; name one that `nvidia-smi -L` lists, or set -1 to "
                    "quantise on the CPU."
                )
            # With a driver that is older than torch's CUDA, torch finds no GPU and raises no error
            # (c10/cuda/CUDAFunctions.cpp, device_count).
            if not gpu and shutil.which("nvidia-smi") and visible:
                raise ResourceError(
                    f"torch {installed_version('torch')} cannot use the GPUs that `nvidia-smi -L` lists; update their "
                    "driver, or set CUDA_VISIBLE_DEVICES=-1 to quantise on the CPU."
                )
            check_memory(stage_needs(self.request, gpu), gpu)

    def result(self, record: Mapping[str, Any], extra: NvidiaExtra, complete: bool = True) -> BuildResult:
        """Return the result of the job.

        `record` is the record that `quantised_checkpoint` returns.
        """
        return BuildResult(
            limits=self.request.limits,
            quantisation=self.request.quantisation,
            parallelism=self.request.parallelism,
            complete=complete,
            quality=record["quality"],
            golden=record.get("golden"),
            extra=extra,
        )

    def _quantisation_lines(self) -> list[str]:
        """Return the lines of the dry run about calibration and the limits of the quality loss.

        The loss is stated if it is known before the build.
        """
        request = self.request
        lines = [f"scales groups of {request.group_size} inputs"] if request.group_size else []
        if request.calibrates:
            lines.append(request.calibration.describe(planned_on_gpu(self.spec), request.quant_format.calib_limit))
        return lines + ([f"quality gate: {request.gates.describe()}"] if request.measure_quality else [])

    def _too_large_lines(self) -> list[str]:
        """Return a warning about stages for which the GPUs of --gpu have too little memory."""
        if self.spec.gpu is None:
            return []
        gpu, count = find_gpu(self.spec.gpu), self.spec.tp * self.spec.pp
        names = [stage.stage for stage in self.stage_requirements if stage.gpu > count * gpu.memory]
        if not names:
            return []
        hardware = f"{count} x {gpu.name} ({count * gpu.memory / 2**30:.0f} GiB)"
        return [
            f"These stages need more memory than {hardware}: {', '.join(names)}; run `llmops build` with more GPUs, "
            "or on CPU"
        ]


def _check_output_adapters(request: BuildRequest, adapters: Sequence[AdapterCheckpoint]) -> None:
    """Raise InputError for an adapter of attention's output that TensorRT-LLM would read wrongly.

    Before NVIDIA/TensorRT-LLM #17153, which is in 1.3, the runtime splits the adapter as if its
    input were as wide as the hidden state (`cpp/tensorrt_llm/runtime/loraModule.cpp`, kATTN_DENSE).
    """
    arch = request.checkpoint.architecture
    width = arch.num_heads * arch.head_dim
    if width == arch.hidden_size or release_of(request.image.tensorrt_llm) >= (1, 3):
        return
    for adapter in adapters:
        if "attn_dense" in adapter.modules:
            raise InputError(
                f"--adapter {adapter.name} adapts o_proj, which has {width} inputs, and TensorRT-LLM before 1.3 "
                f"assumes {arch.hidden_size}; train it without o_proj, or use --target pytorch --set image={OWN_TAG}."
            )
