"""Bounds on how much longer a tokenizer.json makes a text, whose author may be a stranger."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmops.input_files import MAX_TABLE_BYTES, read_json

#: Characters that all replacements of a text together may write for one. Known tokenizers write 1.
MAX_GROWTH = 16
#: Tokens that a tokenizer may add around a text. Known tokenizers add up to 4.
MAX_ADDED_TOKENS = 64
#: Characters of all added tokens together, of which control tokens become a regular expression of
#: 100 bytes per character. 65,536 tokens for audio have one million.
MAX_ADDED_CHARACTERS = 2**21
#: Ids of a vocabulary for each of its tokens, above the first 65,536. The library prints the ids
#: that have no token.
MAX_IDS_PER_TOKEN = 2


def check_growth(path: Path) -> None:
    """Raise ValueError if the rules in a tokenizer.json make a text more than MAX_GROWTH times as long.

    A rule that writes 100 KB for a letter makes gigabytes of a request, and chained rules do so
    with short texts; so do special tokens that are added to each text, or are books, and ids
    without a token. A decoder that removes characters at the end of a token is refused, too: the
    library panics at a shorter one; so is one with a regular expression, which no known one has.

    Raises:
        OSError: The file cannot be read, or is too large.
        ValueError: It is not JSON, or a rule writes or removes too much.
    """
    spec = read_json(path, MAX_TABLE_BYTES)
    if not isinstance(spec, dict):
        raise ValueError("it is no JSON object")
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        growth = math.prod(max(1, len(text)) for text in _written(spec.get(part)))
        if growth > MAX_GROWTH:
            raise ValueError(
                f"the rules of its {part} write up to {growth:.3g} characters for one, more than {MAX_GROWTH}"
            )
    listed = spec.get("added_tokens")
    contents = [one.get("content") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    characters = sum(len(one) for one in contents if isinstance(one, str))
    if characters > MAX_ADDED_CHARACTERS:
        raise ValueError(f"its added tokens have {characters:,} characters, more than {MAX_ADDED_CHARACTERS:,}")
    model = spec.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = [one for one in vocabulary.values() if isinstance(one, int)] if isinstance(vocabulary, dict) else []
    if max(ids, default=0) > 2**16 + MAX_IDS_PER_TOKEN * len(ids):
        raise ValueError(f"its {len(ids):,} tokens have ids up to {max(ids):,}")
    added = _added_tokens(spec.get("post_processor"))
    if added > MAX_ADDED_TOKENS:
        raise ValueError(f"it adds {added:,} special tokens to each text, more than {MAX_ADDED_TOKENS}")
    if _strips_ends(spec.get("decoder")):
        raise ValueError("its decoder removes characters at the end of tokens, which shorter tokens do not have")
    if any(patterns(spec.get("decoder"))):
        raise ValueError("its decoder has a regular expression, which may take minutes for a long token")


def patterns(rule: Any) -> Iterator[str]:
    """Yield the regular expressions in a rule."""
    if isinstance(rule, dict):
        if isinstance(rule.get("Regex"), str):
            yield rule["Regex"]
        rule = list(rule.values())
    for one in rule if isinstance(rule, list) else ():
        yield from patterns(one)


def is_panic(error: BaseException) -> bool:
    """Return True for a panic in the Rust code of `tokenizers`, which is no Exception."""
    return type(error).__name__ == "PanicException"


def _added_tokens(rule: Any) -> int:
    """Return how many tokens a post-processor adds, at most, to a text or to two."""
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


def _strips_ends(rule: Any) -> bool:
    if isinstance(rule, list):
        return any(map(_strips_ends, rule))
    if not isinstance(rule, dict):
        return False
    return (rule.get("type") == "Strip" and rule.get("stop") != 0) or any(map(_strips_ends, rule.values()))


def _written(rule: Any) -> Iterator[str]:
    """Yield the texts that a rule and the rules in it write."""
    if isinstance(rule, list):
        for one in rule:
            yield from _written(one)
    elif isinstance(rule, dict):
        for name, value in rule.items():
            if name in ("content", "prepend", "replacement") and isinstance(value, str):
                yield value
            elif name != "pattern":
                yield from _written(value)
