"""Write the detokenizer that GenAI needs beside an IR.

GenAI compiles grammars (xgrammar) against the detokenizer's vocabulary. Answers are detokenised by
the gateway. openvino_tokenizers converts whole tokenizers only from transformers objects, but a
detokenizer's few nodes can be assembled from tokenizer.json.
"""

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

FILE_NAME = "openvino_detokenizer.xml"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def write_detokenizer(tokenizer_json: Path, vocab_size: int, directory: Path) -> None:
    """Write openvino_detokenizer.xml and .bin for a byte-level or SentencePiece tokenizer.json."""
    import openvino as ov
    from openvino_tokenizers.constants import DETOKENIZER_NAME, STRING_OUTPUT_NAME
    from openvino_tokenizers.tokenizer_pipeline import FuseStep, VocabDecoderStep

    vocabulary, special = vocabulary_bytes(tokenizer_json, vocab_size)
    decoder = VocabDecoderStep(vocab=vocabulary, skip_tokens=special)
    token_ids = ov.op.Parameter(ov.Type.i64, ov.PartialShape(["?", "?"]))
    ragged = FuseStep().get_ov_subgraph(decoder.get_ov_subgraph(ov.opset13.convert(token_ids, "i32").outputs()))
    text = ov.opset15.string_tensor_pack(*ragged)
    text.output(0).set_names({STRING_OUTPUT_NAME})
    model = ov.Model([text], [token_ids], DETOKENIZER_NAME)
    ov.save_model(model, directory / FILE_NAME)


def vocabulary_bytes(tokenizer_json: Path, size: int) -> tuple[list[bytes], list[int]]:
    """Return the UTF-8 bytes of each token id below `size`, and the special ids.

    The bytes of a token without a text are empty.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    convert = _byte_level if _has_byte_level(json.loads(tokenizer_json.read_text()).get("decoder")) else _metaspace
    vocabulary = [b""] * size
    for token, index in tokenizer.get_vocab(with_added_tokens=False).items():
        vocabulary[index] = convert(token)
    special = []
    for index, added in tokenizer.get_added_tokens_decoder().items():
        vocabulary[index] = added.content.encode()
        if added.special:
            special.append(index)
    return vocabulary, special


def _has_byte_level(decoder: Any) -> bool:
    if isinstance(decoder, dict):
        return decoder.get("type") == "ByteLevel" or any(_has_byte_level(part) for part in decoder.get("decoders", []))
    return False


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each of GPT-2's printable characters stands for."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    return bytes(_ALPHABET[c] for c in token) if all(c in _ALPHABET for c in token) else token.encode()


def _metaspace(token: str) -> bytes:
    match = _BYTE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()
