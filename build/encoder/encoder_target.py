"""Build encoders: one OpenVINO graph from token ids to a vector or a score."""

from __future__ import annotations

from pathlib import Path

from llmops.build.checkpoint.file_checks import copy_checked, reject_changed_files, reject_odd_settings
from llmops.build.encoder.encoder_checkpoint import EncoderCheckpoint
from llmops.build.engine_folder.manifest import EngineLimits, TokenizerInfo
from llmops.build.engine_folder.manifest_extras import (
    CrossEncoderExtra,
    EmbeddingInfo,
    EncoderExtra,
    ManifestExtra,
    ScoreInfo,
)
from llmops.build.environment import installed_version
from llmops.build.progress import Progress
from llmops.build.spec import BuildSpec, setting_flag
from llmops.build.target_facts import TargetName
from llmops.build.targets.build_target import BuildResult, BuildTarget, TargetJob
from llmops.build.tokenizer.tokenizer_trial import try_tokenizer
from llmops.distribution import missing_extra
from llmops.errors import InputError

#: Maximum number of texts per batch, unless --max-batch-size sets another.
_DEFAULT_BATCH = 32
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


class EncoderTarget(BuildTarget[EncoderCheckpoint]):
    """The build target of encoders, in float32 only.

    Encoders are small, and other number formats would change the vectors.
    """

    name: TargetName = "openvino"

    def prepare(self, spec: BuildSpec, checkpoint: EncoderCheckpoint) -> EncoderJob:
        if spec.target != self.name:
            raise InputError(f"{checkpoint.ref} is an encoder, which only --target openvino builds; give that target.")
        if spec.quant != "none":
            raise InputError(f"{checkpoint.ref} is an encoder, which is served in float32; leave out --quant.")
        if spec.max_seq_len is not None and spec.max_seq_len > checkpoint.max_seq_len:
            raise InputError(
                f"--max-seq-len {spec.max_seq_len} is more tokens than the encoder reads; use at most "
                f"{checkpoint.max_seq_len}."
            )
        if spec.tp * spec.pp * spec.ep != 1:
            raise InputError("--target openvino runs on one CPU; leave out --tp, --pp and --ep.")
        if spec.options:
            raise InputError(f"An encoder has no {setting_flag(next(iter(spec.options)))}; leave it out.")
        return EncoderJob(spec, checkpoint)


class EncoderJob(TargetJob[EncoderCheckpoint]):
    """The build of an encoder. The build takes seconds, so no stage is kept for a restart."""

    @property
    def versions(self) -> dict[str, str]:
        return {"openvino": installed_version("openvino")}

    @property
    def disk_bytes(self) -> int:
        # The graph is in float32, also where the checkpoint has a smaller dtype.
        return 4 * self.checkpoint.parameters + (16 << 20)

    @property
    def dry_run_lines(self) -> list[str]:
        limits = self._limits
        gives = "scores for pairs of texts" if self.checkpoint.head else "vectors"
        return [
            f"an encoder: gives {gives}, {limits.max_batch_size} texts of up to {limits.max_seq_len} tokens at once"
        ]

    def check(self) -> None:
        if not installed_version("openvino"):
            raise missing_extra("Building an encoder needs openvino, which is not installed", "embedded")

    def write_tokenizer(self, directory: Path, progress: Progress) -> TokenizerInfo:
        directory.mkdir()
        for name in _TOKENIZER_FILES:
            if (self.checkpoint.path / name).is_file():
                copy_checked(self.checkpoint.path / name, directory / name)
        reject_changed_files(self.checkpoint.path, self.checkpoint.states, dict.fromkeys(_TOKENIZER_FILES))
        try_tokenizer(directory / "tokenizer.json", self.checkpoint.ref)
        with reject_odd_settings(self.checkpoint.ref):
            size, pad = int(self.checkpoint.config["vocab_size"]), int(self.checkpoint.config.get("pad_token_id") or 0)
            return TokenizerInfo(vocab_size=size, end_ids=[], pad_id=pad, chat_template=False)

    def build(self, workdir: Path, progress: Progress) -> BuildResult:
        import openvino as ov

        from llmops.build.encoder.encoder_graph import build_graph

        directory = workdir / "model"
        directory.mkdir()
        with reject_odd_settings(self.checkpoint.ref):
            layers = float(self.checkpoint.config["num_hidden_layers"])
            with progress.stage("Reading weights", total=layers):
                model = build_graph(self.checkpoint, progress.advance)
        with progress.stage("Writing the model"):
            ov.save_model(model, directory / "openvino_model.xml", compress_to_fp16=False)
        return BuildResult(limits=self._limits, extra=_extra(self.checkpoint))

    @property
    def _limits(self) -> EngineLimits:
        length = self.spec.max_seq_len or self.checkpoint.max_seq_len
        batch = self.spec.max_batch_size or _DEFAULT_BATCH
        return EngineLimits(max_batch_size=batch, max_seq_len=length, max_num_tokens=batch * length)


def _extra(checkpoint: EncoderCheckpoint) -> ManifestExtra:
    if checkpoint.head is not None:
        types = int(checkpoint.config.get("type_vocab_size", 1))
        return CrossEncoderExtra(score=ScoreInfo(activation="sigmoid", token_types=types))
    dimensions = int(checkpoint.config["hidden_size"])
    return EncoderExtra(
        embedding=EmbeddingInfo(dimensions=dimensions, pooling=checkpoint.pooling, normalised=checkpoint.normalise)
    )
