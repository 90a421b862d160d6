"""xgrammar_tokenizer_info.json: what the C++ backend must know of the tokenizer to hold output to a grammar.

Format: NVIDIA/TensorRT-LLM `examples/generate_xgrammar_tokenizer_info.py` (`_xgrammar_tokenizer_info` of
`tensorrt_llm/llmapi/tokenizer.py`): `encoded_vocab`, the token texts by id as the vocabulary spells them;
`tokenizer_str`, the whole tokenizer.json; `stop_token_ids`, which may follow a complete text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE_NAME = "xgrammar_tokenizer_info.json"


def tokenizer_info(tokenizer_json: Path, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """The file's content. An id that the vocabulary leaves out gets an empty text, so that positions stay ids."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    texts = [""] * (max(vocabulary.values()) + 1)
    for text, token_id in vocabulary.items():
        texts[token_id] = text
    return {"encoded_vocab": texts, "tokenizer_str": tokenizer.to_str(), "stop_token_ids": list(stop_token_ids)}


def write_tokenizer_info(engine: Path, tokenizer_dir: str, stop_token_ids: Sequence[int]) -> None:
    """Write the file beside engine.json; `tokenizer_dir` is relative to the engine folder."""
    info = tokenizer_info(engine / tokenizer_dir / "tokenizer.json", stop_token_ids)
    (engine / FILE_NAME).write_text(json.dumps(info))
