"""Write the tokenizer folder of an engine.

A reader of the folder needs neither torch nor transformers.
"""

import contextlib
import json
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmops.build.checkpoint import Checkpoint
from llmops.build.checkpoint.chat_template import TEMPLATE, render_messages
from llmops.build.checkpoint.file_checks import copy_checked
from llmops.build.engine_folder.manifest import TokenizerInfo
from llmops.build.tokenizer.slow_conversion import convert_slow
from llmops.build.tokenizer.tokenizer_trial import try_tokenizer
from llmops.chat_template_tags import MAX_TEMPLATE_CHARACTERS
from llmops.distribution import missing_extra
from llmops.errors import CheckpointError

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
_SLOW = ("tokenizer.model", "vocab.json")


def check_tokenizer(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if the checkpoint has no tokenizer, or too long a chat template.

    No file is read.
    """
    candidates = (checkpoint.path.name,) if checkpoint.format == "gguf" else (TOKENIZER, *_SLOW)
    if not any(name in checkpoint.tokenizer_files for name in candidates):
        hint = (
            "use a GGUF file that contains its tokenizer"
            if checkpoint.format == "gguf"
            else "copy tokenizer.json to it"
        )
        raise CheckpointError(f"{checkpoint.ref} has no tokenizer; {hint}.")
    if len(checkpoint.chat_template or "") > MAX_TEMPLATE_CHARACTERS:
        raise CheckpointError(
            f"{checkpoint.ref} has a chat template of more than {MAX_TEMPLATE_CHARACTERS:,} characters, which no "
            "gateway takes; shorten it."
        )


def write_tokenizer(checkpoint: Checkpoint, directory: Path, warn: Callable[[str], None]) -> TokenizerInfo:
    """Write the tokenizer files into `directory`.

    Raises:
        CheckpointError: The tokenizer is damaged or does not fit the model.
    """
    check_tokenizer(checkpoint)
    directory.mkdir(parents=True)
    if checkpoint.format == "gguf":
        _from_gguf(checkpoint, directory)
    else:
        _from_folder(checkpoint, directory)
    if checkpoint.chat_template is not None:
        (directory / TEMPLATE).write_text(checkpoint.chat_template, encoding="utf-8")
        # A template may reject this message, which is no fault. A template that never ends is found
        # here, because it would hang a later stage.
        with contextlib.suppress(ValueError):
            render_messages(directory, ["a"])
    _check_written(checkpoint, directory, warn)
    _make_loadable(directory / CONFIG)
    special = checkpoint.special_tokens
    return TokenizerInfo(
        vocab_size=checkpoint.architecture.vocab_size,
        bos_id=special.bos,
        end_ids=list(special.end),
        pad_id=special.pad,
        chat_template=checkpoint.chat_template is not None,
    )


def _from_gguf(checkpoint: Checkpoint, directory: Path) -> None:
    from llmops.build.tokenizer.gguf_tokenizer import tokenizer_from_gguf

    try:
        tokenizer = tokenizer_from_gguf(checkpoint.metadata)
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise CheckpointError(
            f"The tokenizer inside {checkpoint.ref} is damaged or incomplete ({error!r}); download it again."
        ) from error
    tokenizer.save(str(directory / TOKENIZER), pretty=False)
    (directory / CONFIG).write_text(json.dumps(_config_of_gguf(checkpoint), indent=2, ensure_ascii=False) + "\n")


def _config_of_gguf(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the content of tokenizer_config.json for a GGUF file: fields for chat templates."""
    tokens, special = checkpoint.metadata["tokenizer.ggml.tokens"], checkpoint.special_tokens
    ids = {"bos_token": special.bos, "eos_token": special.end[0] if special.end else None, "pad_token": special.pad}
    return {
        **{key: tokens[index] for key, index in ids.items() if index is not None},
        "clean_up_tokenization_spaces": False,
        "model_max_length": checkpoint.architecture.max_position_embeddings,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _from_folder(checkpoint: Checkpoint, directory: Path) -> None:
    if TOKENIZER not in checkpoint.tokenizer_files:
        _convert_slow(checkpoint, directory)
        return
    for name in (TOKENIZER, CONFIG, "special_tokens_map.json"):
        if name in checkpoint.tokenizer_files:
            copy_checked(checkpoint.location(name), directory / name, checkpoint.path)
    if not (directory / CONFIG).exists():
        (directory / CONFIG).write_text("{}\n")


def _make_loadable(path: Path) -> None:
    """Rewrite tokenizer_config.json so that transformers 4 and 5 both take tokenizer.json as it is.

    TensorRT-LLM compiles grammars for the tokenizer that transformers loads. TensorRT-LLM 1.3 has
    transformers 5, which rebuilds a tokenizer whose class is named for a model: DeepSeek's
    byte-level tokenizers name LlamaTokenizerFast, and would become SentencePiece tokenizers.
    TensorRT-LLM 1.2 has transformers 4.57, which knows no class TokenizersBackend and no list of
    `extra_special_tokens`. Both versions look for the code that `auto_map` names, which is not
    beside an engine's tokenizer.
    """
    config = json.loads(path.read_text())
    if not isinstance(config, dict):
        return
    changed = {**config, "tokenizer_class": "PreTrainedTokenizerFast"}
    changed.pop("auto_map", None)
    if isinstance(config.get("extra_special_tokens"), list):
        changed["additional_special_tokens"] = changed.pop("extra_special_tokens")
    if changed != config:
        path.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n")


def _convert_slow(checkpoint: Checkpoint, directory: Path) -> None:
    """Let transformers convert tokenizer.model, or vocab.json with merges.txt, to the fast form."""
    if find_spec("transformers") is None:
        what = f"{checkpoint.ref} has no {TOKENIZER}, and the conversion of its older form needs transformers"
        raise missing_extra(what, "quantize")
    with tempfile.TemporaryDirectory() as copies:
        for name in ("config.json", *checkpoint.tokenizer_files):
            copy_checked(checkpoint.location(name), Path(copies, name), checkpoint.path)
        convert_slow(Path(copies), directory, checkpoint.ref)
    if not (directory / TOKENIZER).is_file():
        raise CheckpointError(
            f"The tokenizer of {checkpoint.ref} has no fast form; add a {TOKENIZER} to the checkpoint."
        )


def _check_written(checkpoint: Checkpoint, directory: Path, warn: Callable[[str], None]) -> None:
    from tokenizers import Tokenizer

    try_tokenizer(directory / TOKENIZER, checkpoint.ref)
    try:
        tokenizer = Tokenizer.from_file(str(directory / TOKENIZER))
        json.loads((directory / CONFIG).read_text())
    except Exception as error:  # tokenizers raises no subclass of Exception.
        raise CheckpointError(f"The tokenizer of {checkpoint.ref} is damaged ({error}); download it again.") from error
    limit = checkpoint.architecture.vocab_size
    highest = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)
    if highest >= limit:
        raise CheckpointError(
            f"The tokenizer of {checkpoint.ref} has ids up to {highest}, and the model's vocabulary ends at "
            f"{limit - 1}: they belong to different checkpoints. Download both again."
        )
    beyond = {index: token.content for index, token in tokenizer.get_added_tokens_decoder().items() if index >= limit}
    if beyond:
        _drop_tokens(directory / TOKENIZER, limit)
        names = ", ".join([*beyond.values()][:5]) + (f" and {len(beyond) - 5:,} more" if len(beyond) > 5 else "")
        warn(f"Dropped {names} from the tokenizer, because the model has no embedding for them.")


def _drop_tokens(path: Path, limit: int) -> None:
    """Remove added tokens without an embedding, whose ids are `limit` or larger.

    The engine would fail on these tokens. Such tokens are, for example, image placeholders of
    text-only models.
    """
    content = json.loads(path.read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < limit]
    path.write_text(json.dumps(content, ensure_ascii=False))
