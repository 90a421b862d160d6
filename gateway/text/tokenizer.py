"""A model's tokenizer, from the `tokenizer/` folder of its engine (tokenizer.json and tokenizer_config.json)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from llmops.errors import InputError
from llmops.gateway.text.control_tokens import ControlTokens, find_control_tokens
from llmops.gateway.text.detokenizer import Detokenizer, DetokenizerFactory
from llmops.gateway.text.rendered_prompt import RenderedPrompt
from llmops.gateway.text.special_token_frame import SpecialTokenFrame
from llmops.gateway.text.token_lower_bound import bound_for_tokenizer

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


# characters of a text per token that is wanted of it, at first; tokens that a cut may change, and those around a text
_BEGINNING, _BESIDE_THE_CUT = 8, 64


class TextTokenizer:
    """Text to token ids and back. Safe to use from several threads."""

    def __init__(self, directory: Path) -> None:
        """Raises InputError when the folder is not there or its tokenizer.json cannot be read."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise InputError(
                f"{directory} has no tokenizer.json; set models.NAME.tokenizer_dir in the gateway's configuration to a "
                "copy of the engine's tokenizer folder."
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            raise InputError(f"{path} cannot be read as a tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.config = _read_config(directory / "tokenizer_config.json")
        self.chat_template = _read_template(directory, self.config)
        self._detokenizers = DetokenizerFactory(self._tokenizer)
        self._bound = bound_for_tokenizer(self._tokenizer)
        self._vocab_size = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        self.controls: ControlTokens | None = None

    @property
    def special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token … as a chat template sees them."""
        found = {name: _token_text(self.config.get(name)) for name in SPECIAL_TOKENS}
        return {name: text for name, text in found.items() if text is not None}

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def keep_controls_apart(self) -> ControlTokens:
        """From now on, prompts can tell the template's control tokens from their text in clients' messages."""
        if self.controls is None:
            tokens = find_control_tokens(self._tokenizer, self.special_tokens.get("unk_token"))
            self.controls = ControlTokens(self._tokenizer, tokens)
        return self.controls

    def min_token_count(self, text: str, enough: int) -> int:
        """A lower bound of the tokens in `text`, without tokenising it; counting stops above `enough`."""
        return self._bound.least(text, enough) if self._bound is not None else 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # encode() keeps the GIL for the whole text; the batch form releases it and skips the offsets
        encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded[0].ids
        return ids

    def encode_prompt(self, prompt: RenderedPrompt, *, add_special_tokens: bool = False) -> list[int]:
        """The ids of a rendered prompt. Raises InvalidRequestError for what cannot be told from control tokens."""
        if prompt.own is None or self.controls is None:
            return self.encode(prompt.text, add_special_tokens=add_special_tokens)
        ids = self.encode(prompt.text, add_special_tokens=False)
        apart = self.controls.encode(prompt, ids)
        return self.frame.ids(apart) if add_special_tokens else apart

    @cached_property
    def frame(self) -> SpecialTokenFrame:
        """What stands around every text."""
        return SpecialTokenFrame(self._tokenizer, 1)

    @cached_property
    def pair_frame(self) -> SpecialTokenFrame:
        """What stands around two texts that are read together."""
        return SpecialTokenFrame(self._tokenizer, 2)

    def encode_beginning(self, text: str, tokens: int, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text` or of a beginning of it that has more than `tokens`, so that what comes after is not
        tokenised only to be cut off."""
        length = _BEGINNING * (tokens + 1)
        while length < len(text):
            # words are tokenised each for itself; where there are none, only the tokens next to the cut may differ
            space = text.rfind(" ", length // 2, length)
            ids = self.encode(text[: space if space > 0 else length], add_special_tokens=add_special_tokens)
            if len(ids) > tokens + _BESIDE_THE_CUT:
                return ids
            length *= 4
        return self.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        known = ids if self.controls is None else [i for i in ids if i != self.controls.alias_id]
        # decode() keeps the GIL for all of them; the batch form releases it
        return str(self._tokenizer.decode_batch([known], skip_special_tokens=skip_special_tokens)[0])

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, or None when there is no such id."""
        if self.controls is not None and token_id == self.controls.alias_id:
            return None
        text: str | None = self._tokenizer.id_to_token(token_id)
        return text

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary, or None if there is no such token."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental detokenizer for one sequence."""
        return self._detokenizers.make(skip_special_tokens)

    def has_special(self, tokens: Iterable[str]) -> bool:
        """Whether any of these texts is a special token, which skip_special_tokens would take out of the text."""
        return any(self._detokenizers.is_special(token) for token in tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text, as UTF-8 bytes (a token may hold half a character)."""
        return self._detokenizers.token_bytes(token_id)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def _read_template(directory: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json, as in transformers; of several, the one named default."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None


def _token_text(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
