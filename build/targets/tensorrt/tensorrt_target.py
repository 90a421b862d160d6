"""Target tensorrt: export a TensorRT-LLM checkpoint with ModelOpt, and run `trtllm-build`.

The second step runs on this machine or later in the image.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

from llmops.build.checkpoint import Checkpoint
from llmops.build.checkpoint.lora_adapters import AdapterCheckpoint, read_adapters
from llmops.build.engine_folder.build_stages import link_tree, stage
from llmops.build.engine_folder.manifest_extras import TensorrtExtra
from llmops.build.progress import Progress
from llmops.build.quality.quality_gates import user_limits
from llmops.build.spec import BuildSpec
from llmops.build.target_facts import TargetName
from llmops.build.targets.build_target import BuildResult, BuildTarget
from llmops.build.targets.nvidia import trtllm_build
from llmops.build.targets.nvidia.build_request import (
    BuildRequest,
    boolean_option,
    check_calibration,
    make_request,
    unknown_options,
)
from llmops.build.targets.nvidia.gpu_checks import check_gpu
from llmops.build.targets.nvidia.nvidia_job import NvidiaJob
from llmops.build.targets.nvidia.quantize_stages import quantised_checkpoint
from llmops.build.targets.tensorrt import tensorrt_options
from llmops.build.trtllm.backend_files import copy_adapters, write_prefetch, write_tokenizer_info
from llmops.errors import InputError

TOKENIZER_DIR = "tokenizer"
_UNPAGED = "# no KV cache reuse, no chunked context: use --kv-cache auto, or fp8 with --quant fp8 or w4a8_awq"


class TensorrtTarget(BuildTarget[Checkpoint]):
    """The target tensorrt.

    `--set flag.NAME=VALUE` passes any flag to trtllm-build, and `--set serve.NAME=VALUE` sets a
    parameter of the C++ backend.
    """

    name: TargetName = "tensorrt"

    def prepare(self, spec: BuildSpec, checkpoint: Checkpoint) -> TensorrtJob:
        unknown_options(spec, frozenset(tensorrt_options.OPTIONS), (tensorrt_options.FLAG, tensorrt_options.SERVE))
        request = tensorrt_options.with_draft_tokens(make_request(spec, checkpoint))
        check_calibration(request)
        if spec.ep != 1:
            raise InputError(
                "--ep is not possible: ModelOpt exports only experts that are split over all GPUs; leave it out."
            )
        tensorrt_options.check_adapters(request)
        job = TensorrtJob(request, read_adapters(spec.options.get("adapters"), checkpoint.architecture))
        tensorrt_options.check_serving(job.serve, request, job.argv)
        check_gpu(request)
        return job


class TensorrtJob(NvidiaJob):
    """A build of TensorRT engines.

    `argv` is the command line of trtllm-build, with paths relative to the engine folder. `serve`
    are the parameters of the C++ backend.

    Raises:
        InputError: A setting is unknown, or has a wrong value.
    """

    copies = 2  # The build writes a checkpoint and an engine.

    def __init__(self, request: BuildRequest, adapters: list[AdapterCheckpoint]) -> None:
        super().__init__(request, adapters)
        self.serve = tensorrt_options.serve_parameters(request)
        self.argv = tensorrt_options.engine_arguments(request, adapters)
        self.guided = boolean_option(request.spec, "guided", True)

    def commands(self) -> list[str]:
        image = self.request.image
        return [
            *([] if tensorrt_options.uses_paged_context(self.argv) else [_UNPAGED]),
            f"# in {self.spec.output}, inside {image.reference}\n" + " \\\n  ".join(trtllm_build.flag_lines(self.argv)),
            "# or on a docker host\n" + shlex.join(trtllm_build.docker_command(self.spec.output, image)),
        ]

    def check(self) -> None:
        if _can_compile():  # Report a wrong version now, and not after hours of quantisation.
            trtllm_build.check_version(self.request.image)
        super().check()

    def build(self, workdir: Path, progress: Progress) -> BuildResult:
        folder, record = quantised_checkpoint(self.request, workdir / TOKENIZER_DIR, progress)
        link_tree(folder / "checkpoint", workdir / trtllm_build.CHECKPOINT_DIR)
        trtllm_build.write_script(workdir, self.argv, self.request.image)
        if self.guided:
            with progress.stage("Writing the vocabulary for grammars"):
                write_tokenizer_info(workdir, TOKENIZER_DIR, self.checkpoint.special_tokens.end)
        copy_adapters(self.adapters, workdir)
        lora_bytes, rows = write_prefetch(self.adapters, workdir, self.checkpoint.architecture, self.spec.tp)
        (workdir / trtllm_build.ENGINE_DIR).mkdir()
        complete = _can_compile()
        if complete:
            self._compile(folder, workdir, progress)
        cache = tensorrt_options.adapter_cache(self.request, self.argv, rows, self.serve)
        extra = self.extra(record["calibration_tokens"], lora_bytes, cache)
        return self.result(record, extra, complete)

    def _compile(self, quantised: Path, workdir: Path, progress: Progress) -> None:
        """Run trtllm-build as a separate stage.

        The stage takes hours, and the log of a failed run must stay.
        """
        spec, image = self.spec, self.request.image
        log = quantised.with_name(trtllm_build.LOG)

        def make(part: Path) -> None:
            link_tree(quantised / "checkpoint", part / trtllm_build.CHECKPOINT_DIR)
            (part / trtllm_build.ENGINE_DIR).mkdir()
            trtllm_build.run(self.argv, part, spec.tp * spec.pp, log, progress)
            shutil.rmtree(part / trtllm_build.CHECKPOINT_DIR)
            os.replace(log, part / trtllm_build.LOG)

        content = {"quantised": quantised.name, "argv": self.argv, "tensorrt_llm": image.tensorrt_llm}
        built, cached = stage(spec.output, "engine", content, make)
        if cached:
            progress.note("Taken from an earlier, unfinished build: the engine.")
        link_tree(built, workdir)

    def extra(self, calibration_tokens: int, lora_bytes: int, cache: dict[str, str]) -> TensorrtExtra:
        spec, request = self.spec, self.request
        return TensorrtExtra(
            tensorrt_llm=request.image.tensorrt_llm,
            image=request.image.reference,
            trtllm_build=self.argv,
            calibration_tokens=calibration_tokens,
            quality_limits=user_limits(spec.options),
            max_input_len=tensorrt_options.max_input_len(request),
            speculative=tensorrt_options.lookahead_sizes(spec),
            guided=self.guided,
            serve=self.serve | cache,
            adapters=self.adapter_entries,
            lora_bytes=lora_bytes,
        )


def _can_compile() -> bool:
    """Return True if trtllm-build is installed.

    Otherwise, the step is left to `llmops build --resume`.
    """
    return shutil.which(trtllm_build.PROGRAM) is not None
