"""Incremental detokenization, which turns a few token ids at a time into text.

However the ids are split, the joined pieces (including `flush` at the end) are exactly
`Tokenizer.decode` of all ids: never half a UTF-8 character, never a missing or doubled space. Text
that later tokens may still change is held back.
"""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
#: Maximum number of tokens that wait for the rest of a character. A character has at most four
#: bytes. Without the limit, an answer of replacement characters would be decoded again as a whole
#: with each token.
MAX_UNFINISHED_TOKENS = 16
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(ABC):
    """An incremental decoder of the tokens of one sequence."""

    @abstractmethod
    def feed(self, ids: Sequence[int]) -> str:
        """Return the additional text that no later token can change after `ids`."""

    @abstractmethod
    def flush(self) -> str:
        """Return the text that was held back, once the sequence has ended."""


class ByteLevelDetokenizer(Detokenizer):
    """A detokenizer for byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM), with a table of bytes."""

    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._decoder = _Utf8Decoder("replace")

    def feed(self, ids: Sequence[int]) -> str:
        table = self._table
        if len(ids) == 1:
            # Fast path: nearly every token is a number of whole characters.
            text = table.texts.get(ids[0])
            if text is not None and not self._decoder.buffer:
                return text
        return self._decoder.decode(b"".join([table[i] for i in ids]))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer(Detokenizer):
    """A detokenizer for every decoder other than byte-level BPE.

    The detokenizer decodes a short window twice and returns the difference. The window starts one
    emitted piece back, so that spaces which depend on the previous token are correct.

    No text is emitted while the text ends in a replacement character (a character that is split
    over tokens) for at most MAX_UNFINISHED_TOKENS, or while the last token is a raw byte
    (`<0x0A>`): ByteFallback turns a run of raw bytes into replacement characters if the run as a
    whole is not valid UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, byte_ids: frozenset[int], skipped: frozenset[int]) -> None:
        """Create the detokenizer.

        Args:
            tokenizer: The tokenizer.
            byte_ids: The ids of raw bytes.
            skipped: The ids that add no text, such as special tokens that are not shown.
        """
        self._tokenizer = tokenizer
        self._byte_ids = byte_ids
        self._skipped = skipped
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self._prefix_text = ""

    def feed(self, ids: Sequence[int]) -> str:
        return "".join([self._feed_one(i) for i in ids])

    def _feed_one(self, token: int) -> str:
        # Ids without text must neither end a run of raw bytes nor move the window.
        if token in self._skipped or self._tokenizer.id_to_token(token) is None:
            return ""
        self._ids.append(token)
        if token in self._byte_ids:
            return ""
        text = self._decode(self._ids[self._prefix :])
        is_unfinished = text.endswith(REPLACEMENT) or len(text) <= len(self._prefix_text)
        return "" if is_unfinished and len(self._ids) - self._read < MAX_UNFINISHED_TOKENS else self._emit(text)

    def flush(self) -> str:
        text = self._decode(self._ids[self._prefix :])
        return self._emit(text)

    def _emit(self, text: str) -> str:
        new = text[len(self._prefix_text) :]
        # Only the piece that was emitted last stays in the window, which bounds memory and time per
        # token.
        self._ids = self._ids[self._read :]
        self._prefix, self._read = 0, len(self._ids)
        self._prefix_text = self._decode(self._ids)
        return new

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


class ByteTable(dict[int, bytes]):
    """A table of the bytes of each token id, filled on first use.

    Unknown ids and `special_ids` have no bytes.

    Attributes:
        texts: The texts of tokens that consist of whole characters, by id.
    """

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        super().__init__()
        self.texts: dict[int, str] = {}
        self._tokenizer = tokenizer
        self._special_ids = special_ids

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)
        data = b"" if token is None else _bytes_of(token)
        self[token_id] = data
        with suppress(UnicodeDecodeError):
            self.texts[token_id] = data.decode()
        return data


class DetokenizerFactory:
    """A factory of one tokenizer's detokenizers, which share its tables."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        # To serialize and parse the whole tokenizer would delay other threads: 0.9 s for 32 MB.
        decoder = tokenizer.decoder and json.loads(tokenizer.decoder.__getstate__())
        self._byte_level = _is_byte_level(decoder)
        self._skipping = ByteTable(tokenizer, self._special_ids)
        self._keeping = ByteTable(tokenizer, frozenset())
        ids = (tokenizer.token_to_id(f"<0x{value:02X}>") for value in range(256))
        self._byte_ids = frozenset(i for i in ids if i is not None)

    def make(self, skip_special_tokens: bool) -> Detokenizer:
        """Return a new detokenizer of the kind that the tokenizer's decoder needs."""
        if self._byte_level:
            return ByteLevelDetokenizer(self._skipping if skip_special_tokens else self._keeping)
        skipped = self._special_ids if skip_special_tokens else frozenset()
        return WindowDetokenizer(self._tokenizer, self._byte_ids, skipped)

    def is_special(self, token: str) -> bool:
        """Return True if `token` is a special token."""
        return self._tokenizer.token_to_id(token) in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that a token adds to the text."""
        if self._byte_level:
            return self._keeping[token_id]
        token = self._tokenizer.id_to_token(token_id) or ""
        if token_id in self._byte_ids:
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders", [])
        return len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


def _byte_characters() -> dict[str, int]:
    """Return the byte that each of GPT-2's 256 printable characters stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [value for value in range(256) if value not in set(printable)]
    table = {chr(value): value for value in printable}
    table.update({chr(256 + offset): value for offset, value in enumerate(rest)})
    return table


_BYTE_OF = _byte_characters()


def _bytes_of(token: str) -> bytes:
    """Return the bytes of a token as the ByteLevel decoder does.

    A token with characters outside the byte alphabet stands for its own text.
    """
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()
