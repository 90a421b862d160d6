"""Characters that input may not contain, and printing of untrusted text.

A terminal obeys control characters, and characters without width or with another direction mislead
a reader. Names, addresses and identifiers may not contain such characters. Untrusted text is
printed through `escape_unsafe`, which escapes these characters and cuts text that is too long.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

#: Maximum number of characters that `escape_unsafe` prints by default: enough for every valid name.
MAX_PRINTABLE_LENGTH = 300

#: Characters that a terminal obeys or that mislead a reader: control characters, line and paragraph
#: separators, direction marks, characters without width, tags, and halves of surrogate pairs.
UNSAFE_CHARACTERS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
#: Characters without a shape, or whose shape depends on the terminal or font (format characters of
#: scripts, private and unassigned ones), which make two names look alike. Answers may contain some
#: of them, for instance in emoji.
_SHAPELESS_CHARACTERS = re.compile(
    "[\u00ad\u034f\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164"
    "\ufe00-\ufe0f\uffa0\ufff0-\ufff8\ue000-\uf8ff\ufdd0-\ufdef\ufffc\ufffe\uffff\U000110bd\U000110cd"
    "\U00013430-\U0001345f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U0001fffe\U0001ffff\U0002fffe\U0002ffff\U0003fffe-\U0010ffff]"
)
_FORMS = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def is_safe_text(text: str) -> bool:
    """Return True if `text` has no character that a terminal obeys or a reader cannot see."""
    return UNSAFE_CHARACTERS.search(text) is None and _SHAPELESS_CHARACTERS.search(text) is None


def strip_unsafe(text: str) -> str:
    """Return `text` without control characters and characters that a reader cannot see."""
    if text.isascii() and text.isprintable():
        return text
    return _SHAPELESS_CHARACTERS.sub("", UNSAFE_CHARACTERS.sub("", text))


def escape_unsafe(text: str, most: int = MAX_PRINTABLE_LENGTH, lines: bool = False) -> str:
    """Return `text` with unsafe characters escaped, and cut to `most` characters.

    Args:
        text: Any text.
        most: The maximum number of characters of `text` to keep.
        lines: True to keep line breaks and tabs, for a traceback.
    """
    if len(text) > most:
        text = f"{text[:most]}… ({len(text) - most:,} more characters)"
    if text.isascii() and text.isprintable():
        return text
    return UNSAFE_CHARACTERS.sub(_shown_with_lines if lines else _shown_one, text)


def json_escape_unsafe(data: Any) -> str:
    """Return `data` as indented JSON in which unsafe characters are written as JSON escapes.

    A JSON parser reads the escapes as the original characters.
    """
    text = json.dumps(data, indent=2, ensure_ascii=False)
    return UNSAFE_CHARACTERS.sub(lambda found: found[0] if found[0] == "\n" else _in_json(found[0]), text)


def _in_json(character: str) -> str:
    return "\\u007f" if character == "\x7f" else json.dumps(character)[1:-1]


def _shown_one(found: re.Match[str]) -> str:
    character = found[0]
    return _FORMS.get(character) or _escaped(character)


def _shown_with_lines(found: re.Match[str]) -> str:
    character = found[0]
    return character if character in "\n\t" else _shown_one(found)


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def json_texts(value: Any, *, names: bool = False) -> Iterator[str]:
    """Yield all texts in a JSON value, in any order.

    Include the names of fields if `names` is true.
    """
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            waiting.extend([*one, *one.values()] if names else one.values())
        elif isinstance(one, (list, tuple)):
            waiting.extend(one)
