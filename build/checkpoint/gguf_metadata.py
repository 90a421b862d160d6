"""Check the types of the GGUF metadata that a build reads (source: ggml's gguf.md).

The checks run before any other module reads the metadata.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmops.errors import CheckpointError

TypeCheck = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _number(value: Any) -> bool:
    return _whole(value) or (isinstance(value, float) and math.isfinite(value))


def _list_of(check: TypeCheck) -> TypeCheck:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _merge(value: Any) -> bool:
    return isinstance(value, str) and " " in value


_KEYS: dict[str, tuple[TypeCheck, str]] = {
    "general.architecture": (_text, "text"),
    "general.alignment": (lambda value: _whole(value) and value in range(8, 4097, 8), "a multiple of 8 up to 4,096"),
    "tokenizer.ggml.model": (_text, "text"),
    "tokenizer.ggml.pre": (_text, "text"),
    "tokenizer.ggml.tokens": (_list_of(_text), "a list of texts"),
    "tokenizer.ggml.token_type": (_list_of(_whole), "a list of whole numbers"),
    "tokenizer.ggml.scores": (_list_of(lambda value: isinstance(value, float) and value == value), "a list of numbers"),
    "tokenizer.ggml.merges": (_list_of(_merge), "a list of pairs of texts"),
    "tokenizer.ggml.add_bos_token": (_flag, "true or false"),
    "tokenizer.ggml.add_eos_token": (_flag, "true or false"),
    "tokenizer.ggml.add_space_prefix": (_flag, "true or false"),
}
#: Checks of the keys that begin with the architecture's name, such as llama.block_count.
_ARCHITECTURE_KEYS: dict[str, tuple[TypeCheck, str]] = {
    "embedding_length": (_whole, "a whole number"),
    "block_count": (_whole, "a whole number"),
    "attention.head_count": (_whole, "a whole number"),
    "attention.head_count_kv": (_whole, "a whole number"),
    "attention.key_length": (_whole, "a whole number"),
    "feed_forward_length": (_whole, "a whole number"),
    "context_length": (_whole, "a whole number"),
    "expert_count": (_whole, "a whole number"),
    "attention.layer_norm_rms_epsilon": (_number, "a number"),
    "rope.freq_base": (_number, "a number"),
    "rope.scaling.type": (_text, "text"),
    "rope.scaling.factor": (_number, "a number"),
}


def check_metadata(path: Path, metadata: Mapping[str, Any]) -> None:
    """Check the types of known keys, and token ids against the vocabulary.

    Raises:
        CheckpointError: A value has another type, or a token id lies beyond the vocabulary.
    """
    architecture = metadata.get("general.architecture")
    keys = _KEYS | {f"{architecture}.{key}": check for key, check in _ARCHITECTURE_KEYS.items()}
    for key, (check, expected) in keys.items():
        if key in metadata and not check(metadata[key]):
            raise _damaged(path, f"{key} is {_short(metadata[key])} where {expected} belongs")
    _check_vocabulary(path, metadata)


def _check_vocabulary(path: Path, metadata: Mapping[str, Any]) -> None:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return
    for name in ("bos", "eos", "eot", "padding", "unknown"):
        key = f"tokenizer.ggml.{name}_token_id"
        if key in metadata and not (_whole(metadata[key]) and metadata[key] < len(tokens)):
            raise _damaged(path, f"{key} is {_short(metadata[key])}, and the vocabulary has {len(tokens)} tokens")
    for name in ("scores", "token_type"):
        length = len(metadata.get(f"tokenizer.ggml.{name}", tokens))
        if length != len(tokens):
            raise _damaged(path, f"tokenizer.ggml.{name} has {length} entries for {len(tokens)} tokens")


def _damaged(path: Path, fault: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {fault}. Download it again.")


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"
