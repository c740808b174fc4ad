"""Worked solutions with their arithmetic written in small steps.

The generator writes ``9 * 92 = 828`` and sums of five terms in one go. A network of a few million weights
does such sums poorly in its head, so training texts show the intermediate results: ``9 * 92 = 810 + 18 =
828``. Every rewritten line is checked with exact fractions; an expression that this file does not
understand keeps its text.
"""

import re
from fractions import Fraction

_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
_UNIT = r"(?: ?/?(?!x\b)[A-Za-z][A-Za-z/'\u2019-]*(?: (?!x\b)[A-Za-z][A-Za-z/'\u2019-]*){0,5})?"
_OPERATOR = r" ?[-+*/x\u00d7÷] ?"
_EXPRESSION = re.compile(
    rf"(?<![\d.(^])(?P<left>[€£$]?{_NUMBER}{_UNIT}(?:{_OPERATOR}[€£$]?{_NUMBER}%?{_UNIT})+)"
    rf"(?P<equals> ?= ?)(?P<result>[€£$]?{_NUMBER})(?![\d)%]| ?[-+*/\u00d7÷])"
)
_TERM = re.compile(rf"({_OPERATOR})?[€£$]?({_NUMBER})(%?){_UNIT}")
_SYMBOLS = {"x": "*", "\u00d7": "*", "÷": "/"}
_MAX_DECIMALS = 4


def spell_out(solution: str) -> str:
    """Return the solution with long sums and hard products written in small steps.

    The words, the last line and every result stay as they are; only ``= intermediate`` parts are inserted.
    """
    return _EXPRESSION.sub(_spell_match, solution)


def _spell_match(match: re.Match[str]) -> str:
    values, operators = _parse(match["left"])
    result = Fraction(match["result"].lstrip("€£$").replace(",", ""))
    forms = _steps(values, operators, result)
    if not forms:
        return match[0]
    equals = match["equals"]
    return match["left"] + "".join(equals + form for form in forms) + equals + match["result"]


def _parse(left: str) -> tuple[list[Fraction], list[str]]:
    """Return the numbers of an expression and the operators between them, as ``+ - * /``."""
    values: list[Fraction] = []
    operators: list[str] = []
    for term in _TERM.finditer(left):
        if term[1] is not None:
            symbol = term[1].strip()
            operators.append(_SYMBOLS.get(symbol, symbol))
        values.append(Fraction(term[2].replace(",", "")) / (100 if term[3] else 1))
    return values, operators


def _steps(values: list[Fraction], operators: list[str], result: Fraction) -> list[str]:
    """Return the forms between an expression and its result; none when not needed or not understood."""
    if len(operators) != len(values) - 1:
        return []
    forms: list[str] = []
    while operators:
        if operators == ["*"]:
            forms += _product_forms(values[0], values[1])
        reduced = _reduce_once(values, operators)
        if reduced is None:
            return []
        values, operators = reduced
        if operators:
            forms.append(_written(values, operators))
    if values[0] != result or any(not form for form in forms):
        return []
    return forms


def _reduce_once(values: list[Fraction], operators: list[str]) -> tuple[list[Fraction], list[str]] | None:
    """Do the operation that comes first; a/b*c with c divisible by b becomes a*(c/b)."""
    products = [index for index, operator in enumerate(operators) if operator in "*/"]
    at = products[0] if products else 0
    a, b = values[at], values[at + 1]
    if operators[at] == "/" and b == 0:
        return None
    if operators[at] == "/" and (a / b).denominator != 1 and operators[at + 1 : at + 2] == ["*"]:
        c = values[at + 2]
        if (c / b).denominator == 1:
            merged = [a, c / b] if a != 1 else [c / b]
            kept = ["*"] if a != 1 else []
            return [*values[:at], *merged, *values[at + 3 :]], [*operators[:at], *kept, *operators[at + 2 :]]
    value = {"+": a + b, "-": a - b, "*": a * b}[operators[at]] if operators[at] != "/" else a / b
    return [*values[:at], value, *values[at + 2 :]], [*operators[:at], *operators[at + 1 :]]


def _product_forms(a: Fraction, b: Fraction) -> list[str]:
    """Return ``a * b`` as a sum over one factor's digits, then running totals; none for an easy product."""
    parts_a, parts_b = _digit_parts(a), _digit_parts(b)
    if not parts_a or not parts_b or max(len(parts_a), len(parts_b)) < 2 or _is_easy(a) or _is_easy(b):
        return []
    if min(len(parts_a), len(parts_b)) == 1:
        split, other = (parts_a, b) if len(parts_a) > 1 else (parts_b, a)
    else:
        split, other = (parts_a, b) if len(parts_a) <= len(parts_b) else (parts_b, a)
    if len(split) > 4:
        return []
    terms = [part * other for part in split]
    forms = []
    while len(terms) > 1:
        forms.append(_written(terms, ["+"] * (len(terms) - 1)))
        terms = [terms[0] + terms[1], *terms[2:]]
    return forms


def _is_easy(value: Fraction) -> bool:
    """Return whether multiplying by the number only moves the point: 1, 10, 0.1."""
    return _text(value).strip("0.") == "1" and _text(value).count("1") == 1


def _digit_parts(value: Fraction) -> list[Fraction]:
    """Return the values of a number's digits other than zero: 300 and 5 for 305; empty if it has no text."""
    text = _text(value)
    whole, _, decimals = text.partition(".")
    digits = whole + decimals
    scale = Fraction(10) ** (len(whole) - 1)
    return [int(digit) * scale / 10**index for index, digit in enumerate(digits) if digit != "0"]


def _written(values: list[Fraction], operators: list[str]) -> str:
    """Return the expression as text without units; empty when a value has no text."""
    texts = [_text(value) for value in values]
    if not all(texts):
        return ""
    return texts[0] + "".join(
        f" {operator} {text}" for operator, text in zip(operators, texts[1:], strict=True)
    )


def _text(value: Fraction) -> str:
    """Return a number as digits; empty when it is negative or needs more than four decimals."""
    scaled = value * 10**_MAX_DECIMALS
    if value < 0 or scaled.denominator != 1:
        return ""
    if value.denominator == 1:
        return str(value.numerator)
    digits = str(scaled.numerator).rjust(_MAX_DECIMALS + 1, "0")
    return f"{digits[:-_MAX_DECIMALS]}.{digits[-_MAX_DECIMALS:]}".rstrip("0")
