"""Features of an answer's text that differ between a good and a broken version of a model.

Each feature is a rough guess about a single answer. Only its frequency over many answers, compared
with the frequency on another version, is evidence.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

#: Number of characters that are examined, at the end of a prompt and at the beginning of an answer.
#: Bounds the CPU time per answer.
MAX_CHARACTERS = 1000
#: FOREIGN_SHARE is the minimum fraction, and FOREIGN_LETTERS the minimum number, of an answer's
#: letters in a script that the prompt does not have, for `script_mismatch`. Fewer letters may be a
#: quotation or a name.
FOREIGN_SHARE, FOREIGN_LETTERS = 0.2, 4
#: An answer of at least GARBLED_WORDS words is garbled if more than the fraction GARBLED_SHARE of
#: the words is odd. Shorter answers may be a name or an identifier.
GARBLED_WORDS, GARBLED_SHARE = 8, 0.25
#: An answer of at least PLAIN_WORDS Latin words is garbled if less than the fraction PLAIN_SHARE of
#: the words is common. Sentences have more, and random words of a vocabulary have 0.01.
PLAIN_WORDS, PLAIN_SHARE = 16, 0.05

#: Letters of each script. Kana and Han are one script here, because Japanese mixes them.
_SCRIPTS = {
    "latin": "A-Za-zÀ-ɏḀ-ỿ",
    "greek": "Ͱ-Ͽἀ-῿",
    "cyrillic": "Ѐ-ԯ",
    "hebrew": "֐-׿",
    "arabic": "؀-ۿݐ-ݿ",
    "indic": "ऀ-෿",
    "thai": "฀-๿",
    "hangul": "ᄀ-ᇿ가-힯",
    "cjk": "぀-ヿ㐀-䶿一-鿿",
}
_LETTERS = {script: re.compile(f"[{letters}]") for script, letters in _SCRIPTS.items()}
_REFUSAL = re.compile(
    r"\W*(i['’]?m (very |really |so )?sorry|(i )?apologi[sz]e|as an ai\b|i['’]m (unable|not able) to"
    r"|(unfortunately, )?i (can['’]?t|cannot|can not|won['’]?t|will not|am unable to))",
    re.IGNORECASE,
)
# Pattern of an odd word: a capital or digit after a small letter, punctuation or several scripts
# within a word, or 25 letters in a row.
_ODD_WORD = re.compile(
    r"\ufffd|[a-zß-ÿ][A-ZÀ-Þ0-9]|[^\W\d_][^\w\s'’.,:/@-]+[^\W\d_]|\w{25}|[A-Za-z](?=[^\x00-\u02ff\W])|[^\x00-\u02ff\W][A-Za-z]"
)

# The most common words of English, German, French, Spanish, Italian, Portuguese and Dutch.
_COMMON = (
    "the of and to a in is that it for on with as are this be or by from at an if not you your i can we he was his has"
    " der die das und ist ein eine zu den von mit für nicht le la les de des et est un une que en à du pour dans el los"
    " y es por con para il di che e per non o um uma os do da het een van op have"
)
_COMMON_WORDS = frozenset(_COMMON.split())


class AnswerFeatures(NamedTuple):
    """The features of an answer, each of which is a guess.

    Attributes:
        refused: True if the answer begins like a refusal.
        script_mismatch: True if a part of the answer is in a script that the prompt does not have.
        garbled: True if the answer does not look like words.
    """

    refused: bool
    script_mismatch: bool
    garbled: bool


def describe_answer(prompt: str, answer: str) -> AnswerFeatures:
    """Return the features of an answer to a prompt."""
    prompt, answer = prompt[-MAX_CHARACTERS:], answer[:MAX_CHARACTERS]
    return AnswerFeatures(bool(_REFUSAL.match(answer)), _has_foreign_script(prompt, answer), _is_garbled(answer))


def _has_foreign_script(prompt: str, answer: str) -> bool:
    letters = Counter({script: len(pattern.findall(answer)) for script, pattern in _LETTERS.items()})
    # Latin letters do not count, because an answer in any language may contain code or names.
    foreign = [count for script, count in letters.items() if script != "latin" and not _LETTERS[script].search(prompt)]
    return any(count >= max(FOREIGN_LETTERS, FOREIGN_SHARE * letters.total()) for count in foreign)


def _is_garbled(answer: str) -> bool:
    words = answer.split()
    if "\ufffd" in answer:
        return True
    if len(words) < GARBLED_WORDS:
        return False
    if sum(bool(_ODD_WORD.search(word)) for word in words) > GARBLED_SHARE * len(words):
        return True
    latin = re.findall(r"[a-zß-ɏ]+", answer.lower())
    common = sum(word in _COMMON_WORDS for word in latin)
    return len(latin) >= PLAIN_WORDS and common < PLAIN_SHARE * len(latin)
