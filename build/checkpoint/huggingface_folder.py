"""Open a Hugging Face folder as a `Checkpoint`, and recognise how its weights are quantised."""

from pathlib import Path
from typing import Any

from llmops.build.checkpoint import safetensors_header
from llmops.build.checkpoint.description import (
    Checkpoint,
    CheckpointFile,
    ExistingQuantisation,
    SpecialTokens,
)
from llmops.build.checkpoint.file_checks import (
    check_file_size,
    open_checked,
    read_json,
    reject_named_files,
    reject_outside_symlinks,
)
from llmops.build.model.architecture import Architecture
from llmops.errors import CheckpointError
from llmops.input_files import MAX_TABLE_BYTES, read_opened

MODELOPT_FILE = "hf_quant_config.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
#: Maximum size of a chat template in bytes. Published templates have up to 30,000.
MAX_TEMPLATE_BYTES = 2**20
#: Files that TensorRT-LLM reads when it starts a model with encoders, also if all requests are
#: texts (NVIDIA/TensorRT-LLM `tensorrt_llm/_torch/models/modeling_gemma3vl.py`,
#: Gemma3InputProcessor).
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
#: `quant_cfg.json` describes the layers of a mixed precision (NVIDIA/TensorRT-LLM
#: `tensorrt_llm/_torch/model_config.py`, load_modelopt_quant_config).
_CONFIG_FILES = (
    "config.json", "generation_config.json", safetensors_header.INDEX_NAME, MODELOPT_FILE, "quant_cfg.json",
)  # fmt: skip


def open_folder(folder: Path, ref: str, weights: bool = True) -> Checkpoint:
    """Open a Hugging Face folder. With `weights=False`, a folder without weight files is accepted.

    Raises:
        CheckpointError: A file is missing or damaged, or a link leads out of the folder.
    """
    states = reject_outside_symlinks(folder)
    for name in TOKENIZER_FILES:
        check_file_size(folder / name, MAX_TABLE_BYTES)
    config = read_json(folder / "config.json")
    architecture = Architecture.from_hf_config(config)
    shards = safetensors_header.shard_files(folder)
    if weights and not shards:
        raise CheckpointError(_no_weights(folder))
    names = [*_CONFIG_FILES, *_PROCESSOR_FILES, *TOKENIZER_FILES]
    present = [name for name in names if (folder / name).is_file()] + shards
    generation = _optional_json(folder / "generation_config.json")
    tokenizer = _optional_json(folder / "tokenizer_config.json")
    special = _optional_json(folder / "special_tokens_map.json")
    read = {"config.json": config, "generation_config.json": generation, "tokenizer_config.json": tokenizer}
    processors = {name: _optional_json(folder / name) for name in _PROCESSOR_FILES}
    reject_named_files(folder, {**read, **processors, "special_tokens_map.json": special})
    return Checkpoint(
        ref=ref,
        path=folder,
        format="huggingface",
        config=config,
        architecture=architecture,
        tensors=safetensors_header.read_headers(folder, shards),
        files=tuple(CheckpointFile(name, folder / name, (folder / name).stat().st_size) for name in present),
        states=states,
        weight_files=tuple(shards),
        tokenizer_files=tuple(name for name in TOKENIZER_FILES if (folder / name).is_file()),
        special_tokens=_special_tokens(folder, config, generation, tokenizer),
        name=folder.resolve().name.lower() or "model",
        generation_config=generation,
        chat_template=_chat_template(folder, tokenizer),
        quantisation=detect_quantisation(folder, config),
    )


def _no_weights(folder: Path) -> str:
    pickled = [*folder.glob("pytorch_model*.bin"), *folder.glob("*.pth")]
    if pickled:
        return (
            f"{folder} has its weights as {pickled[0].name}, which is not read because loading this file can run code; "
            "convert it to safetensors."
        )
    return f"{folder} has no *.safetensors files; download the weights too."


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _chat_template(folder: Path, tokenizer: dict[str, Any]) -> str | None:
    """Return the chat template, or None.

    Newer checkpoints have the template in a separate file, and older checkpoints in
    tokenizer_config.json.
    """
    own = folder / "chat_template.jinja"
    if own.is_file():
        return _text(own)
    template = tokenizer.get("chat_template") or _optional_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = [item for item in template if isinstance(item, dict) and item.get("name") == "default"]
        template = named[-1].get("template") if named else None
    return template if isinstance(template, str) else None


def _text(path: Path) -> str:
    check_file_size(path, MAX_TEMPLATE_BYTES)
    try:
        with open_checked(path) as file:
            return read_opened(file, MAX_TEMPLATE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as UTF-8 text ({error}); download it again.") from error


def _special_tokens(
    folder: Path, config: dict[str, Any], generation: dict[str, Any], tokenizer: dict[str, Any]
) -> SpecialTokens:
    """Return the special tokens of a checkpoint, mainly from generation_config.json.

    The tokenizer's own end-of-sequence token is the first in `end`.

    The end-of-sequence token ends a chat turn, is often missing in generation_config.json, and is
    the only token that TensorRT-LLM withholds until `min_tokens`.
    """
    lookup = _TokenIds(folder)
    text_config = config.get("text_config")
    sources = [generation, config, text_config if isinstance(text_config, dict) else {}]
    listed = _ids(_first(sources, "eos_token_id"))
    end = list(dict.fromkeys([*lookup(tokenizer.get("eos_token")), *listed]))
    bos = _ids(_first(sources, "bos_token_id")) or lookup(tokenizer.get("bos_token"))
    pad = _ids(_first(sources, "pad_token_id")) or lookup(tokenizer.get("pad_token")) or listed[:1] or end[:1]
    return SpecialTokens(bos=bos[0] if bos else None, end=tuple(end), pad=pad[0] if pad else None)


def _first(sources: list[dict[str, Any]], key: str) -> Any:
    return next((source[key] for source in sources if source.get(key) is not None), None)


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0]


class _TokenIds:
    """A lookup of token ids by text in the added tokens of tokenizer.json.

    The file is read on first use.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table: dict[str, int] | None = None

    def __call__(self, token: Any) -> list[int]:
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str):
            return []
        if self.table is None:
            self.table = self._read()
        return [self.table[text]] if text in self.table else []

    def _read(self) -> dict[str, int]:
        path = self.folder / "tokenizer.json"
        added = read_json(path, MAX_TABLE_BYTES).get("added_tokens") if path.is_file() else None
        entries = added if isinstance(added, list) else []
        return {
            item["content"]: item["id"] for item in entries if isinstance(item, dict) and {"content", "id"} <= set(item)
        }


_BITS_OF_METHOD = {"fp8": 8, "awq": 4, "gptq": 4, "mxfp4": 4}


def detect_quantisation(folder: Path, config: dict[str, Any]) -> ExistingQuantisation | None:
    """Return the quantisation that the folder's files declare, or None for full precision.

    The files are config.json, in its `quantization_config`, and ModelOpt's hf_quant_config.json.
    """
    modelopt = folder / MODELOPT_FILE
    if modelopt.is_file():
        return _modelopt_quantisation(modelopt)
    quantised = config.get("quantization_config")
    if not isinstance(quantised, dict):
        return None
    method = str(quantised.get("quant_method", "other")).lower()
    known = method in ("fp8", "awq", "gptq", "compressed-tensors", "modelopt", "bitsandbytes", "mxfp4")
    return ExistingQuantisation(
        method=method if known else "other",  # type: ignore[arg-type]
        bits=_bits_per_weight(method, quantised),
        detail=quantised,
    )


def _modelopt_quantisation(path: Path) -> ExistingQuantisation:
    content = read_json(path)
    # ModelOpt 1.x writes the fields at the top level, without the object `quantization`.
    detail = content if "quantization" not in content and "quant_algo" in content else content.get("quantization", {})
    if not isinstance(detail, dict):
        raise CheckpointError(f"{path} has no object `quantization`; export the checkpoint again.")
    algorithm = str(detail.get("quant_algo") or "")
    bits = 4 if algorithm.startswith(("W4", "NVFP4")) else 8 if algorithm else None
    return ExistingQuantisation("modelopt", bits, detail)


def _bits_per_weight(method: str, quantised: dict[str, Any]) -> int | None:
    for field in ("bits", "w_bit"):
        if isinstance(quantised.get(field), int):
            return int(quantised[field])
    if method == "bitsandbytes":
        return 4 if quantised.get("load_in_4bit") else 8
    if method == "compressed-tensors":
        groups = quantised.get("config_groups")
        weights = (
            [one.get("weights") for one in groups.values() if isinstance(one, dict)] if isinstance(groups, dict) else []
        )
        bits = [one.get("num_bits") for one in weights if isinstance(one, dict)]
        return min((b for b in bits if isinstance(b, int)), default=None)
    return _BITS_OF_METHOD.get(method)
