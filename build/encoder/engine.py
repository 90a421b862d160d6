"""Encoder checkpoint → engine folder, atomic and cached by content as any other build."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from llmops import __version__
from llmops.build.encoder.checkpoint import EncoderCheckpoint
from llmops.build.engine_folder.atomic import Workplace, check_space
from llmops.build.engine_folder.manifest import EngineManifest, Limits, Source, SourceFile, TokenizerInfo
from llmops.build.installed import installed_version
from llmops.build.progress import Progress
from llmops.build.spec import BuildSpec
from llmops.errors import InputError, MissingDependencyError

_REVISION = 1
_DEFAULT_BATCH = 32
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def build_encoder(spec: BuildSpec, checkpoint: EncoderCheckpoint, progress: Progress) -> tuple[EngineManifest, bool]:
    """Make the engine folder `spec.output`; returns its manifest and whether it was there already."""
    _check(spec, checkpoint)
    source = _source(checkpoint, progress)
    key = _key(spec, source)
    present = _present(spec.output, key)
    if present is not None:
        return present, True
    check_space(spec.output, 2 * checkpoint.weight_bytes)
    with Workplace(spec.output) as workdir:
        _write_tokenizer(checkpoint, workdir / "tokenizer")
        _write_model(checkpoint, workdir / "model", progress)
        manifest = _manifest(spec, checkpoint, source, key)
        manifest.save(workdir)
    return manifest, False


def _check(spec: BuildSpec, checkpoint: EncoderCheckpoint) -> None:
    if spec.target != "openvino":
        raise InputError(f"{checkpoint.ref} is an encoder; encoders are built with --target openvino.")
    if spec.quant != "none":
        raise InputError(f"{checkpoint.ref} is an encoder, which is served in float32; leave out --quant.")
    if spec.max_seq_len is not None and spec.max_seq_len > checkpoint.max_seq_len:
        raise InputError(
            f"--max-seq-len {spec.max_seq_len} is over the encoder's; use at most {checkpoint.max_seq_len}."
        )
    if spec.tp * spec.pp * spec.ep != 1:
        raise InputError("--target openvino runs on one CPU; leave out --tp, --pp and --ep.")
    if not installed_version("openvino"):
        raise MissingDependencyError("Building an encoder needs openvino: pip install 'llmops[embedded]'.")


def _source(checkpoint: EncoderCheckpoint, progress: Progress) -> Source:
    with progress.stage("Hashing the checkpoint"):
        files = [SourceFile(path=f.path, bytes=f.bytes, sha256=f.sha256) for f in checkpoint.files]
    return Source(checkpoint=checkpoint.ref, format="huggingface", files=files)


def _key(spec: BuildSpec, source: Source) -> str:
    files = [[file.path, file.sha256] for file in source.files]
    openvino = installed_version("openvino")
    content = {"encoder": _REVISION, "files": files, "spec": spec.key_fields(), "openvino": openvino}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _present(output: Path, key: str) -> EngineManifest | None:
    try:
        manifest = EngineManifest.load(output)
    except InputError:
        return None
    return manifest if manifest.key == key and (output / "model" / "openvino_model.bin").is_file() else None


def _write_tokenizer(checkpoint: EncoderCheckpoint, directory: Path) -> None:
    directory.mkdir()
    for name in _TOKENIZER_FILES:
        if (checkpoint.path / name).is_file():
            shutil.copyfile(checkpoint.path / name, directory / name)


def _write_model(checkpoint: EncoderCheckpoint, directory: Path, progress: Progress) -> None:
    import openvino as ov

    from llmops.build.encoder.graph import build_graph

    directory.mkdir()
    with progress.stage("Reading weights", total=float(checkpoint.config["num_hidden_layers"])):
        model = build_graph(checkpoint, progress.advance)
    with progress.stage("Writing the model"):
        ov.save_model(model, directory / "openvino_model.xml", compress_to_fp16=False)


def _manifest(spec: BuildSpec, checkpoint: EncoderCheckpoint, source: Source, key: str) -> EngineManifest:
    length = spec.max_seq_len or checkpoint.max_seq_len
    batch = spec.max_batch_size or _DEFAULT_BATCH
    return EngineManifest(
        key=key,
        name=spec.name or checkpoint.name,
        target="openvino",
        architecture=checkpoint.hf_class,
        source=source,
        versions={"llmops": __version__, "openvino": installed_version("openvino")},
        limits=Limits(max_batch_size=batch, max_seq_len=length, max_num_tokens=batch * length),
        tokenizer=TokenizerInfo(
            vocab_size=int(checkpoint.config["vocab_size"]),
            end_ids=[],
            pad_id=int(checkpoint.config.get("pad_token_id") or 0),
            chat_template=False,
        ),
        extra=_extra(checkpoint),
    )


def _extra(checkpoint: EncoderCheckpoint) -> dict[str, Any]:
    if checkpoint.head is not None:
        return {"score": {"activation": "sigmoid", "token_types": int(checkpoint.config.get("type_vocab_size", 1))}}
    dimensions = int(checkpoint.config["hidden_size"])
    return {"embedding": {"dimensions": dimensions, "pooling": checkpoint.pooling, "normalised": checkpoint.normalise}}
