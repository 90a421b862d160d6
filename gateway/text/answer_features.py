"""Features of an answer's text that differ between a good and a broken version of a model.

Each feature is a rough guess about one answer. It becomes evidence by its frequency, compared with
the frequency on another version.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

#: Characters of a prompt's end and of an answer's beginning that are looked at.
MAX_CHARACTERS = 1000
#: Share of an answer's letters, and number of them, in a script that the prompt does not have.
FOREIGN_SHARE, FOREIGN_LETTERS = 0.2, 4
#: Words of an answer from which it can be called garbled, and the share of odd ones.
GARBLED_WORDS, GARBLED_SHARE = 8, 0.25
#: Latin words of an answer from which it can lack the commonest words of its language, and the
#: share of them that a sentence has at least. Words of a random vocabulary have 0.01.
PLAIN_WORDS, PLAIN_SHARE = 16, 0.05

#: Scripts of which an answer in another language consists. Kana and Han are one: Japanese mixes them.
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
# a capital or a digit after a small letter, signs or scripts mixed inside a word, or no end of letters
_ODD_WORD = re.compile(
    r"\ufffd|[a-zß-ÿ][A-ZÀ-Þ0-9]|[^\W\d_][^\w\s'’.,:/@-]+[^\W\d_]|\w{25}|[A-Za-z](?=[^\x00-\u02ff\W])|[^\x00-\u02ff\W][A-Za-z]"
)

# English, German, French, Spanish, Italian, Portuguese and Dutch
_COMMON = (
    "the of and to a in is that it for on with as are this be or by from at an if not you your i can we he was his has"
    " der die das und ist ein eine zu den von mit für nicht le la les de des et est un une que en à du pour dans el los"
    " y es por con para il di che e per non o um uma os do da het een van op have"
)
_COMMON_WORDS = frozenset(_COMMON.split())


class AnswerFeatures(NamedTuple):
    """Guesses about an answer.

    Attributes:
        refused: The answer begins like a refusal.
        script_mismatch: A part of the answer is in a script that the prompt does not have.
        garbled: The answer does not look like words.
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
    # Latin letters in any answer may be code or names
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
