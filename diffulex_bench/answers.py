"""Find the number an answer gives and compare numbers by value: the one normaliser of all number tasks.

Called by `diffulex_bench.scoring`. A number is kept as an exact fraction, so ``18``, ``18.0``, ``$18`` and
``36/2`` are equal, and ``70,000.`` at the end of a sentence is seventy thousand.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_DIGITS = r"\d{1,3}(?:,\d{3})+(?!\d)|\d+"
_PLAIN = rf"(?:(?:{_DIGITS})(?:\.\d+)?|\.\d+)"
_CURRENCY = r"[$€£¥]"
#: A sign counts only where it cannot be a minus between two operands; a fraction is two whole numbers.
_NUMBER = rf"(?:(?<![\w).])[-+]\s?)?(?:{_CURRENCY}\s?)?(?:(?<![\w).])[-+])?{_PLAIN}(?:\s?/\s?\d+(?![\d./]))?"
_NUMBER_RE = re.compile(_NUMBER)

_MARKER_RE = re.compile(rf"####\s*(?P<value>{_NUMBER})")
_BOXED_RE = re.compile(rf"\\boxed\s*\{{\s*(?P<value>{_NUMBER})[^{{}}]*\}}")
_PHRASE_RE = re.compile(
    rf"(?:final\s+)?answer\s*(?:is\s*:?|:|=)\s*\**\s*(?P<value>{_NUMBER})", flags=re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Extraction:
    """A number found in a text: the characters as they stand there, how they were found, their value."""

    text: str
    method: str
    value: Fraction


def parse_number(text: str) -> Fraction | None:
    """The value of a text that is one number, None when it is anything else.

    Accepts a sign, a currency sign, thousands commas, decimals, a fraction of whole numbers, a trailing
    full stop and a trailing ``%`` (which is dropped, as answers in percent are written both ways).
    """
    cleaned = _plain_signs(text).strip().rstrip(".").rstrip("%").strip()
    match = _NUMBER_RE.fullmatch(cleaned)
    return _value_of(match.group()) if match else None


def extract_strict(text: str) -> Extraction | None:
    """The number behind the first ``####``, the form in which GSM8K gives its answers."""
    match = _MARKER_RE.search(_plain_signs(text))
    return _extraction(match, "hash_marker") if match else None


def extract_flexible(text: str) -> Extraction | None:
    r"""The number a reader would take for the answer.

    Tried in this order: the first ``####``, the last ``\boxed{}``, the last "answer is" or "answer:", the
    last number of the text.
    """
    strict = extract_strict(text)
    if strict is not None:
        return strict
    plain = _plain_signs(text)
    for pattern, method in ((_BOXED_RE, "boxed"), (_PHRASE_RE, "answer_phrase"), (_NUMBER_RE, "last_number")):
        matches = list(pattern.finditer(plain))
        for match in reversed(matches):
            found = _extraction(match, method)
            if found is not None:
                return found
    return None


def _extraction(match: re.Match[str], method: str) -> Extraction | None:
    text = match.groupdict().get("value") or match.group()
    value = _value_of(text)
    return Extraction(text, method, value) if value is not None else None


def _plain_signs(text: str) -> str:
    r"""Typographic minus, LaTeX ``{,}``, ``\,`` and ``\$`` as plain characters."""
    return text.replace("\u2212", "-").replace("{,}", ",").replace("\\,", "").replace("\\$", "$")


def _value_of(text: str) -> Fraction | None:
    digits = re.sub(rf"[,\s]|{_CURRENCY}", "", text)
    numerator, _, denominator = digits.partition("/")
    if denominator:
        if not re.fullmatch(r"[-+]?\d+", numerator) or int(denominator) == 0:
            return None
        return Fraction(int(numerator), int(denominator))
    return Fraction(numerator)
