"""A model's tokenizer, read from the `tokenizer/` folder of its engine.

The folder has tokenizer.json and tokenizer_config.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from llmops.errors import InputError
from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.text.control_tokens import ControlTokens, RenderedPrompt, find_control_tokens
from llmops.gateway.text.detokenizer import DetokenizerFactory
from llmops.gateway.text.token_lower_bound import MAX_TOKENS_PER_CHARACTER, bound_for_tokenizer
from llmops.input_files import leads_outside
from llmops.tokenizer_files import check_growth, is_panic

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

#: Characters per wanted token that `encode_beginning` tries first: more than a token of any
#: language has on average.
_CHARACTERS_PER_TOKEN = 8

#: Tokens at the end of a text that was cut which may differ from those of the whole text, special
#: tokens included.
_TOKENS_NEAR_CUT = 64
#: Characters that `count_in_pieces` tokenizes at once.
_PIECE_CHARACTERS = 2**15


class TextTokenizer:
    """A tokenizer: text to token ids and back. Safe to use from several threads."""

    def __init__(self, directory: Path) -> None:
        """Load the tokenizer.

        Raise InputError if the folder does not exist or tokenizer.json cannot be read.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise InputError(
                f"{directory} has no tokenizer.json; set models.NAME.tokenizer_dir in the gateway's configuration to a "
                "copy of the engine's tokenizer folder."
            )
        if link := next((one for one in directory.iterdir() if leads_outside(one, directory)), None):
            raise InputError(f"{link} leads out of its folder, so prompts could have text of another file; copy it.")
        try:
            check_growth(path)
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            raise InputError(f"{path} cannot be read as a tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.config = _read_config(directory / "tokenizer_config.json")
        self.chat_template = _read_template(directory, self.config)
        self.detokenizers = DetokenizerFactory(self._tokenizer)
        self._lower_bound = bound_for_tokenizer(self._tokenizer)
        self.vocab_size = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        self.controls: ControlTokens | None = None

    @property
    def special_tokens(self) -> dict[str, str]:
        """Return the texts of `bos_token`, `eos_token` and so on, as a chat template names them."""
        found = {name: _token_text(self.config.get(name)) for name in SPECIAL_TOKENS}
        return {name: text for name, text in found.items() if text is not None}

    def keep_controls_apart(self) -> ControlTokens:
        """Return the control tokens.

        From now on, prompts tell the template's from their text in clients' messages.
        """
        if self.controls is None:
            tokens = find_control_tokens(self._tokenizer, self.special_tokens.get("unk_token"))
            self.controls = ControlTokens(self._tokenizer, tokens)
        return self.controls

    def min_token_count(self, text: str, enough: int) -> int:
        """Return a lower bound of the tokens in `text` without tokenizing it.

        The bound is 0 for texts so short that they have at most `enough` tokens. Counting stops
        above `enough`.
        """
        is_short = len(text) * MAX_TOKENS_PER_CHARACTER <= enough
        return 0 if is_short or self._lower_bound is None else self._lower_bound.least(text, enough)

    def count_in_pieces(self, text: str, enough: int) -> int:
        """Return at least how many tokens `text` has, by tokenizing pieces until there are `enough`.

        A token of a whole text takes 500 bytes of memory, and one of a piece is given back.
        """
        count = 0
        for start in range(0, len(text), _PIECE_CHARACTERS):
            piece = text[start : start + _PIECE_CHARACTERS]
            count += max(0, len(self.encode(piece, add_special_tokens=False)) - _TOKENS_NEAR_CUT)
            if count > enough:
                break
        return count

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`.

        Raises:
            InvalidRequestError: A regular expression of the tokenizer takes too many steps for it.
        """
        # encode() keeps the GIL for the whole text; the batch form releases it and skips the
        # offsets
        try:
            ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            # of its Rust code; no handler of errors catches it
            if not is_panic(error):
                raise
            raise InvalidRequestError(f"This model's tokenizer cannot read the text ({str(error)[:100]}).") from error
        return ids

    def encode_prompt(self, prompt: RenderedPrompt, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a rendered prompt.

        Raises:
            InvalidRequestError: A client's text cannot be kept apart from a control token.
        """
        if prompt.own is None or self.controls is None:
            return self.encode(prompt.text, add_special_tokens=add_special_tokens)
        ids = self.controls.encode(prompt, self.encode(prompt.text, add_special_tokens=False))
        return self.frame.ids(ids) if add_special_tokens else ids

    @cached_property
    def frame(self) -> SpecialTokenFrame:
        """Return the special tokens around one text."""
        return SpecialTokenFrame(self._tokenizer, 1)

    @cached_property
    def pair_frame(self) -> SpecialTokenFrame:
        """Return the special tokens around two texts that are read together."""
        return SpecialTokenFrame(self._tokenizer, 2)

    def encode_beginning(self, text: str, tokens: int, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, or of a beginning of it with more than `tokens` tokens.

        Saves tokenizing the rest of a text of which only the first `tokens` are used.
        """
        length = _CHARACTERS_PER_TOKEN * (tokens + 1)
        while length < len(text):
            # each word is tokenized by itself; without words, only the tokens next to the cut may
            # differ
            space = text.rfind(" ", length // 2, length)
            ids = self.encode(text[: space if space > 0 else length], add_special_tokens=add_special_tokens)
            if len(ids) > tokens + _TOKENS_NEAR_CUT:
                return ids
            length *= 4
        return self.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`."""
        known = ids if self.controls is None else [i for i in ids if i != self.controls.alias_id]
        # decode() keeps the GIL for all of them; the batch form releases it
        return str(self._tokenizer.decode_batch([known], skip_special_tokens=skip_special_tokens)[0])

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling of a token, or None if the id does not exist."""
        if self.controls is not None and token_id == self.controls.alias_id:
            return None
        text: str | None = self._tokenizer.id_to_token(token_id)
        return text

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling in the vocabulary.

        The result is None if the token does not exist.
        """
        found: int | None = self._tokenizer.token_to_id(token)
        return found


class SpecialTokenFrame:
    """The special tokens that a tokenizer puts around its input.

    The input is one text, or two texts that are read together.

    Read off an example, so that it holds for every kind of tokenizer. The texts come tokenized
    without special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, texts: int) -> None:
        """Read the frame of `texts` texts, one or two."""
        example = tokenizer.encode(*["a"] * texts)
        # (id, type) of every special token before each text and after the last one
        self._around: list[list[tuple[int, int]]] = [[]]
        # the type of each text's own tokens
        self._types: list[int] = []
        for token, kind, text in zip(example.ids, example.type_ids, example.sequence_ids, strict=True):
            if text is None:
                self._around[-1].append((token, kind))
            elif text == len(self._types):
                self._types.append(kind)
                self._around.append([])
        self.size = sum(map(len, self._around))

    def ids(self, *texts: Sequence[int]) -> list[int]:
        """Return the token ids of `texts` with the special tokens around them."""
        ids = [token for token, _ in self._around[0]]
        for text, after in zip(texts, self._around[1:], strict=True):
            ids += text
            ids += [token for token, _ in after]
        return ids

    def types(self, *texts: Sequence[int]) -> list[int]:
        """Return the model's `token_type_ids`.

        Each of `ids` has the number of the text to which it belongs.
        """
        types = [kind for _, kind in self._around[0]]
        for text, own, after in zip(texts, self._types, self._around[1:], strict=True):
            types += [own] * len(text)
            types += [kind for _, kind in after]
        return types


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def _read_template(directory: Path, config: dict[str, Any]) -> str | None:
    """Return the chat template, or None if the tokenizer has none.

    chat_template.jinja comes before tokenizer_config.json; if there are several templates, the one
    named default is used.

    The order is that of transformers.
    """
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
