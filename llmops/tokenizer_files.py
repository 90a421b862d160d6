"""Limits on how much longer a tokenizer.json, which may come from an untrusted source, makes texts."""

import base64
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llmops.input_files import MAX_TABLE_BYTES, read_json

#: Maximum number of characters that all rules of a part together may write for one character. A
#: table of NFKC writes 18, and a rule with a regular expression, which may match before a character,
#: counts as one more character.
MAX_GROWTH = 36
#: Maximum number of rules of a part. Each takes time for a text. Known tokenizers have up to 8.
MAX_RULES = 32
#: Kinds of rules that write several characters for one: its bytes, spaces around it, a mark before it.
_GROWING = {"ByteLevel": 4, "BertNormalizer": 3, "Metaspace": 2}
#: Maximum number of characters that Unicode's compatibility forms write for one (UAX #15). The
#: other forms write up to 4, which is left out because models with NFC would count most texts twice.
_NORMAL_FORMS = {"NFKC": 18, "NFKD": 18}
#: Maximum number of special tokens that a tokenizer may add to a text. Known tokenizers add up to
#: 4.
MAX_ADDED_TOKENS = 64
#: Maximum length in characters of a mark that a model writes before or after each part of a word, to
#: look the part up. Known marks have up to 4.
MAX_MARK_LENGTH = 16
#: Maximum number of characters of all added tokens together. Control tokens become a regular
#: expression with 100 bytes per character. The largest known, 65,536 tokens for audio, have one
#: million.
MAX_ADDED_CHARACTERS = 2**21
#: Maximum number of characters of one added token. The library takes time in proportion to the
#: square: 16 s for 65,536 characters. Known tokens have up to 64.
MAX_ADDED_LENGTH = 512
#: Maximum ratio of the highest id to the number of tokens, above the first 65,536 ids. The library
#: prints the ids that have no token.
MAX_IDS_PER_TOKEN = 2
#: Maximum length of a token of the model in characters. An answer has the text for each token. The
#: longest known, spaces and NUL bytes of Claude's tokenizer, have 1,024.
MAX_TOKEN_LENGTH = 2048
#: Maximum length in characters of a word that a WordPiece model divides. The library takes time in
#: proportion to the cube: 3 s for 4,096 characters. Known tokenizers have 100.
MAX_WORD_LENGTH = 256
#: Maximum number of characters of all pieces of a Unigram model with which a text may begin. The
#: library copies them at each character of a text. Runs of up to 128 spaces have 8,256.
MAX_NESTED_CHARACTERS = 2**14


def check_growth(path: Path) -> dict[str, Any]:
    """Check that the rules of a tokenizer.json are bounded in length and time.

    Faults that could make gigabytes of a request or an answer, or take minutes, are rejected: rules
    that, alone or chained, write more than MAX_GROWTH characters for one, too many rules, too many
    or too long tokens, too many ids without a token, and models that are slow for long words. Two
    kinds of decoders are rejected as well: a decoder that removes characters at the end of tokens,
    because the library panics at a shorter token, and a decoder with a regular expression, which no
    known tokenizer has.

    Returns:
        The content of the file.

    Raises:
        OSError: The file cannot be read, or is too large.
        ValueError: The file is not JSON, or a rule exceeds a limit. The message is a clause.
    """
    spec = read_json(path, MAX_TABLE_BYTES)
    if not isinstance(spec, dict):
        raise ValueError("it is not a JSON object")
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        rules = list(_rules(spec.get(part)))
        if len(rules) > MAX_RULES:
            raise ValueError(f"its {part} has {len(rules):,} rules, more than {MAX_RULES}")
        growth = math.prod(map(_growth, rules))
        if growth > MAX_GROWTH:
            raise ValueError(
                f"the rules of its {part} write up to {growth:.3g} characters for one, more than {MAX_GROWTH}"
            )
    listed = spec.get("added_tokens")
    contents = [one.get("content") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    check_added_tokens([one for one in contents if isinstance(one, str)])
    if isinstance(spec.get("model"), dict):
        _check_model(spec["model"])
    added = _added_tokens(spec.get("post_processor"))
    if added > MAX_ADDED_TOKENS:
        raise ValueError(f"it adds {added:,} special tokens to each text, more than {MAX_ADDED_TOKENS}")
    if _repeats_text(spec.get("post_processor")):
        raise ValueError("its post-processor repeats each text")
    if _strips_ends(spec.get("decoder")):
        raise ValueError("its decoder removes characters at the end of tokens, which shorter tokens do not have")
    if any(patterns(spec.get("decoder"))):
        raise ValueError("its decoder has a regular expression, which may take minutes for a long token")
    return spec


def normalizer_growth(spec: dict[str, Any]) -> int:
    """Return the maximum number of characters that the normalizer of a tokenizer.json writes for one."""
    rules = list(_rules(spec.get("normalizer")))
    return max(math.prod(map(_growth, rules)), *(_NORMAL_FORMS.get(str(rule.get("type")), 1) for rule in rules), 1)


def _check_model(model: dict[str, Any]) -> None:
    """Raise ValueError if the vocabulary or the longest word of a tokenizer's model exceeds a limit."""
    vocabulary = model.get("vocab")
    ids = [one for one in vocabulary.values() if isinstance(one, int)] if isinstance(vocabulary, dict) else []
    if max(ids, default=0) > 2**16 + MAX_IDS_PER_TOKEN * len(ids):
        raise ValueError(f"its {len(ids):,} tokens have ids up to {max(ids):,}, so too many ids have no token")
    # A Unigram model lists its pieces, each with a score.
    pieces = [one[0] for one in vocabulary if isinstance(one, list) and one] if isinstance(vocabulary, list) else []
    pieces = [one for one in pieces if isinstance(one, str)]
    longest = max(map(len, vocabulary if isinstance(vocabulary, dict) else pieces), default=0)
    if longest > MAX_TOKEN_LENGTH:
        raise ValueError(f"it has a token of {longest:,} characters, more than {MAX_TOKEN_LENGTH:,}")
    if (nested := _nested_characters(pieces)) > MAX_NESTED_CHARACTERS:
        raise ValueError(f"a text may begin with pieces of {nested:,} characters, more than {MAX_NESTED_CHARACTERS:,}")
    marks = [model.get("continuing_subword_prefix"), model.get("end_of_word_suffix")]
    if (mark := max((len(one) for one in marks if isinstance(one, str)), default=0)) > MAX_MARK_LENGTH:
        raise ValueError(f"it marks parts of words with {mark:,} characters, more than {MAX_MARK_LENGTH}")
    word = model.get("max_input_chars_per_word")
    if isinstance(word, int) and word > MAX_WORD_LENGTH:
        raise ValueError(f"it divides words of up to {word:,} characters, more than {MAX_WORD_LENGTH}")


def _nested_characters(pieces: Sequence[str]) -> int:
    """Return the maximum number of characters of pieces that begin each other."""
    nested: list[str] = []
    characters = most = 0
    for piece in sorted(filter(None, pieces)):
        while nested and not piece.startswith(nested[-1]):
            characters -= len(nested.pop())
        nested.append(piece)
        characters += len(piece)
        most = max(most, characters)
    return most


def check_added_tokens(contents: Sequence[str]) -> None:
    """Raise ValueError if a tokenizer's added tokens are too long, alone or together."""
    longest, characters = max(map(len, contents), default=0), sum(map(len, contents))
    if characters > MAX_ADDED_CHARACTERS:
        raise ValueError(f"its added tokens have {characters:,} characters, more than {MAX_ADDED_CHARACTERS:,}")
    if longest > MAX_ADDED_LENGTH:
        raise ValueError(f"it has an added token of {longest:,} characters, more than {MAX_ADDED_LENGTH}")


def patterns(rule: Any) -> Iterator[str]:
    """Yield the regular expressions in a rule and in all rules below it."""
    if isinstance(rule, dict):
        if isinstance(rule.get("Regex"), str):
            yield rule["Regex"]
        rule = list(rule.values())
    for one in rule if isinstance(rule, list) else ():
        yield from patterns(one)


def is_panic(error: BaseException) -> bool:
    """Return True if the error is a panic in the Rust code of `tokenizers`.

    A panic derives from BaseException, not from Exception.
    """
    return type(error).__name__ == "PanicException"


def _added_tokens(rule: Any) -> int:
    """Return the maximum number of tokens that a post-processor adds to a text or a pair of texts."""
    if isinstance(rule, list):
        return sum(map(_added_tokens, rule))
    if not isinstance(rule, dict):
        return 0
    known = rule.get("special_tokens")
    sizes = {
        name: len(one["ids"])
        for name, one in (known.items() if isinstance(known, dict) else ())
        if isinstance(one, dict) and isinstance(one.get("ids"), list)
    }
    templates = [part for part in (rule.get("single"), rule.get("pair")) if isinstance(part, list)]
    named = [[piece.get("SpecialToken") for piece in part if isinstance(piece, dict)] for part in templates]
    own = [sum(sizes.get(str(one.get("id")), 1) for one in part if isinstance(one, dict)) for part in named]
    return max(own, default=0) + _added_tokens(rule.get("processors"))


def _repeats_text(rule: Any) -> bool:
    """Return True if a post-processor writes a text more than once."""
    for one in _rules(rule):
        for template in (one.get("single"), one.get("pair")):
            pieces = template if isinstance(template, list) else []
            named = [piece.get("Sequence") for piece in pieces if isinstance(piece, dict)]
            texts = [str(text.get("id")) for text in named if isinstance(text, dict)]
            if len(texts) > len(set(texts)):
                return True
    return False


def _strips_ends(rule: Any) -> bool:
    if isinstance(rule, list):
        return any(map(_strips_ends, rule))
    if not isinstance(rule, dict):
        return False
    return (rule.get("type") == "Strip" and rule.get("stop") != 0) or any(map(_strips_ends, rule.values()))


def _rules(rule: Any) -> Iterator[dict[str, Any]]:
    """Yield a rule and all rules below it."""
    if isinstance(rule, dict):
        yield rule
        rule = [value for name, value in rule.items() if name != "pattern"]
    for one in rule if isinstance(rule, list) else ():
        yield from _rules(one)


def _growth(rule: dict[str, Any]) -> int:
    """Return the maximum number of characters that a rule writes for one character."""
    if table := rule.get("precompiled_charsmap"):
        # An index, preceded by its size, and the texts that replace characters.
        content = base64.b64decode(str(table))
        texts = content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")
        return max(1, *(len(text.decode("utf-8", "replace")) for text in texts))
    kind = "BertNormalizer" if "handle_chinese_chars" in rule else str(rule.get("type"))
    written = [rule.get(name) for name in ("content", "prepend", "replacement")]
    length = sum(len(text) for text in written if isinstance(text, str))
    pattern = rule.get("pattern")
    matches_nothing = isinstance(pattern, dict) and ("Regex" in pattern or pattern.get("String") == "")
    return max(1, length + (matches_nothing and "content" in rule), _GROWING.get(kind, 1))
