"""A model's tokenizer, which is read from the `tokenizer/` folder of the model's engine.

The folder contains tokenizer.json and tokenizer_config.json.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from time import monotonic, thread_time
from typing import Any

from tokenizers import Tokenizer

from llmops.errors import InputError
from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.text.control_tokens import ControlTokens, RenderedPrompt, find_control_tokens
from llmops.gateway.text.detokenizer import DetokenizerFactory
from llmops.gateway.text.text_thread_pool import SlowTokenizerError, thread_limit
from llmops.input_files import leads_outside, read_bounded, read_json
from llmops.tokenizer_files import check_growth, is_panic, normalizer_growth, patterns
from llmops.tokenizer_patterns import are_quick

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

#: Number of characters per requested token that `encode_beginning` tries first. More than an
#: average token has in any language.
_CHARACTERS_PER_TOKEN = 8

#: Maximum number of tokens next to a cut in a text that may differ from the tokens of the whole
#: text, including special tokens. WordPiece makes one token of a word of more than 100 characters,
#: and up to 100 of what a cut leaves of the word.
_TOKENS_NEAR_CUT = 104
#: Number of normalized characters that `min_token_count` tokenizes at a time. Bounds memory: each
#: token takes 500 bytes.
_PIECE_CHARACTERS = 2**15
#: Bytes of text per token above which a text is first counted piece by piece. Most texts that fit
#: are shorter, and tokenizing a much longer one whole would take memory for many times the tokens.
BYTES_PER_TOKEN = 4
#: Maximum size of a normalized text that is never counted piece by piece, in bytes. Bounds memory
#: for a model with a long context: each byte can become a token, which takes 500 bytes.
_MAX_WHOLE_BYTES = 2**18
#: Number and size in characters of the samples of a longer text, from which the number of its
#: tokens is estimated. The samples together are a sixteenth of the shortest such text in ASCII.
_SAMPLES, _SAMPLE_CHARACTERS = 64, 2**8
#: CPU seconds for a text, and more for each of its characters, or tokens if they are more, after
#: which a tokenizer counts as slow. Known tokenizers take less than a tenth of this time for
#: ordinary texts.
_QUICK_SECONDS, _QUICK_SECONDS_PER_CHARACTER = 0.02, 1e-5
#: Number of seconds for which a tokenizer counts as slow after such a text.
_SLOW_SECONDS = 10.0


class TextTokenizer:
    """A tokenizer, which converts text to token ids and back. Safe to use from several threads.

    Attributes:
        config: The content of tokenizer_config.json.
        chat_template: The source of the chat template, or None.
        detokenizers: The factory of incremental detokenizers.
        vocab_size: The number of tokens, including added tokens.
        controls: The control tokens, or None before `keep_controls_apart`.
    """

    def __init__(self, directory: Path) -> None:
        """Load the tokenizer.

        Raises:
            InputError: The folder does not exist, or tokenizer.json cannot be read.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise InputError(
                f"{directory} has no tokenizer.json; set models.NAME.tokenizer_dir in the gateway's configuration to a "
                "copy of the engine's tokenizer folder."
            )
        if link := next((one for one in directory.iterdir() if leads_outside(one, directory)), None):
            raise InputError(
                f"{link} leads out of its folder, so prompts may contain text of another file; replace it with a copy."
            )
        try:
            spec = check_growth(path)
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            raise InputError(
                f"{path} cannot be read as a tokenizer ({error}); replace it with the checkpoint's file"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._growth = normalizer_growth(spec)
        own_patterns = patterns([spec.get("normalizer"), spec.get("pre_tokenizer")])
        self._slow_until = 0.0 if are_quick(own_patterns) else math.inf
        self.config = _read_config(directory / "tokenizer_config.json")
        self.chat_template = _read_template(directory, self.config)
        self.detokenizers = DetokenizerFactory(self._tokenizer)
        self.vocab_size = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        self.controls: ControlTokens | None = None

    @property
    def special_tokens(self) -> dict[str, str]:
        """Return the texts of special tokens by the names that chat templates use.

        The names are `bos_token`, `eos_token` and the others in SPECIAL_TOKENS.
        """
        found = {name: _token_text(self.config.get(name)) for name in SPECIAL_TOKENS}
        return {name: text for name, text in found.items() if text is not None}

    @property
    def is_slow(self) -> bool:
        """Return True if texts may take seconds, so that they are tokenized in a thread of their own."""
        return monotonic() < self._slow_until

    def keep_controls_apart(self) -> ControlTokens:
        """Return the control tokens, and distinguish them from text from now on.

        Encoded prompts then have control tokens only where the template wrote them.
        """
        if self.controls is None:
            tokens = find_control_tokens(self._tokenizer, self.special_tokens.get("unk_token"))
            self.controls = ControlTokens(self._tokenizer, tokens)
        return self.controls

    def min_token_count(self, text: str, enough: int) -> int:
        """Return a lower bound of the number of tokens in `text` without tokenizing all of it.

        The bound is 0 for a text that is short enough to be tokenized whole. Counting stops once
        the bound is above `enough`. Tokenizing a whole text takes 500 bytes of memory per token,
        and the memory of a piece is released before the next piece. A long text that fits by an
        estimate is tokenized whole, too, because counting it first would double the time.

        Raises:
            InvalidRequestError: A regular expression of the tokenizer takes too many steps for
                `text`.
        """
        count, size = 0, self._growth * len(text.encode("utf-8", "replace"))
        if size <= min(BYTES_PER_TOKEN * enough, _MAX_WHOLE_BYTES):
            return count
        if size > _MAX_WHOLE_BYTES and self._estimate_token_count(text) <= enough:
            return count
        length = _PIECE_CHARACTERS // self._growth
        for start in range(0, len(text), length):
            piece = text[start : start + length]
            count += max(0, len(self.encode(piece, add_special_tokens=False)) - 2 * _TOKENS_NEAR_CUT)
            if count > enough:
                break
        return count

    def _estimate_token_count(self, text: str) -> float:
        """Return about how many tokens `text` has, from a random place in each of `_SAMPLES` parts."""
        last = len(text) - _SAMPLE_CHARACTERS
        starts = [int((part + random.random()) * last / _SAMPLES) for part in range(_SAMPLES)]
        samples = [text[start : start + _SAMPLE_CHARACTERS] for start in starts]
        tokens = sum(len(self.encode(sample, add_special_tokens=False)) for sample in samples)
        return tokens * len(text) / (_SAMPLES * _SAMPLE_CHARACTERS)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`.

        Raises:
            InvalidRequestError: A regular expression of the tokenizer takes too many steps for
                `text`.
            SlowTokenizerError: The text must be tokenized on another thread.
        """
        if monotonic() < self._slow_until and thread_limit.cpu_seconds < math.inf:
            raise SlowTokenizerError
        begun = thread_time()
        ids: list[int] = []
        # `encode()` holds the GIL for the whole text. The batch function releases the GIL and
        # computes no offsets.
        try:
            ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            # A panic of the Rust code is not an `Exception`, so no other handler catches it.
            if not is_panic(error):
                raise
            raise InvalidRequestError(
                f"This model's tokenizer cannot encode the text ({str(error)[:100]}); shorten it."
            ) from error
        finally:
            if thread_time() - begun > _QUICK_SECONDS + _QUICK_SECONDS_PER_CHARACTER * max(len(text), len(ids)):
                self._slow_until = max(self._slow_until, monotonic() + _SLOW_SECONDS)
        return ids

    def encode_prompt(self, prompt: RenderedPrompt, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a rendered prompt.

        Raises:
            InvalidRequestError: Text from a client cannot be encoded without becoming a control
                token.
        """
        if prompt.own is None or self.controls is None:
            return self.encode(prompt.text, add_special_tokens=add_special_tokens)
        ids = self.controls.encode(prompt, self.encode(prompt.text, add_special_tokens=False))
        return self.frame.ids(ids) if add_special_tokens else ids

    @cached_property
    def frame(self) -> SpecialTokenFrame:
        """Return the special tokens around a single text."""
        return SpecialTokenFrame(self._tokenizer, 1)

    @cached_property
    def pair_frame(self) -> SpecialTokenFrame:
        """Return the special tokens around a pair of texts."""
        return SpecialTokenFrame(self._tokenizer, 2)

    def encode_beginning(self, text: str, tokens: int, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, or of its beginning, with more than `tokens` tokens.

        Saves tokenizing the rest of a text of which only the first `tokens` tokens are used.
        """
        length = _CHARACTERS_PER_TOKEN * (tokens + 1)
        while length < len(text):
            # Words are tokenized separately, so the text is cut at a space. Without spaces, only
            # tokens next to the cut may differ.
            space = text.rfind(" ", length // 2, length)
            ids = self.encode(text[: space if space > 0 else length], add_special_tokens=add_special_tokens)
            if len(ids) > tokens + _TOKENS_NEAR_CUT:
                return ids
            length *= 4
        return self.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`."""
        known = ids if self.controls is None else [i for i in ids if i != self.controls.alias_id]
        # `decode()` holds the GIL for all ids. The batch function releases the GIL.
        return str(self._tokenizer.decode_batch([known], skip_special_tokens=skip_special_tokens)[0])

    def token(self, token_id: int) -> str | None:
        """Return the text of a token in the vocabulary, or None if the id does not exist."""
        if self.controls is not None and token_id == self.controls.alias_id:
            return None
        text: str | None = self._tokenizer.id_to_token(token_id)
        return text

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its text in the vocabulary, or None if it does not exist."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found


class SpecialTokenFrame:
    """The special tokens that a tokenizer adds around its input, a text or a pair of texts.

    The special tokens are read from the encoding of an example, which works for every kind of
    tokenizer. The texts must be tokenized without special tokens.

    Attributes:
        size: The number of special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, texts: int) -> None:
        """Read the special tokens around `texts` texts: 1, or 2 for a pair."""
        example = tokenizer.encode(*["a"] * texts)
        # The id and type of each special token, in a list before each text and a list after the
        # last text.
        self._around: list[list[tuple[int, int]]] = [[]]
        # The type of each text's own tokens.
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
        """Return the model's `token_type_ids`, with the type of each id that `ids` returns."""
        types = [kind for _, kind in self._around[0]]
        for text, own, after in zip(texts, self._types, self._around[1:], strict=True):
            types += [own] * len(text)
            types += [kind for _, kind in after]
        return types


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error}); replace it with the checkpoint's file") from error
    return config if isinstance(config, dict) else {}


def _read_template(directory: Path, config: dict[str, Any]) -> str | None:
    """Return the chat template, or None if the tokenizer has none.

    As in transformers, chat_template.jinja precedes tokenizer_config.json, and among several
    templates the one named `default` is used.
    """
    path = directory / "chat_template.jinja"
    if path.is_file():
        return read_bounded(path).decode()
    template = config.get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        named = [entry for entry in entries if entry.get("name") == "default"] or entries[:1]
        template = named[-1].get("template") if named else None
    return template if isinstance(template, str) else None


def _token_text(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
