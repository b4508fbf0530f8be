"""Regular expressions of JSON numbers in a range. Numbers are bounded in digits, so that no model can spin on them."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from itertools import groupby

MAX_INTEGER_DIGITS = 32
MAX_FRACTION_DIGITS = 32
MAX_EXPONENT_DIGITS = 3
_DOUBLE_DIGITS = 15
_DIGITS = f"[0-9]{{0,{MAX_FRACTION_DIGITS - 1}}}"
_ZEROS = f"0{{0,{MAX_FRACTION_DIGITS - 1}}}"
_NOT_ZERO = f"{_ZEROS}[1-9]{_DIGITS}"
_LARGEST = 10**MAX_INTEGER_DIGITS - 1
ANY_INTEGER = f"-?(?:0|[1-9][0-9]{{0,{MAX_INTEGER_DIGITS - 1}}})"
_EXPONENT = f"[eE][+-]?[0-9]{{1,{MAX_EXPONENT_DIGITS}}}"
ANY_NUMBER = rf"{ANY_INTEGER}(?:\.[0-9]{{1,{MAX_FRACTION_DIGITS}}})?(?:{_EXPONENT})?"


def alternatives(options: list[str]) -> str | None:
    """One expression for all of them; None for none."""
    distinct = list(dict.fromkeys(options))
    if len(distinct) <= 1:
        return distinct[0] if distinct else None
    return f"(?:{'|'.join(distinct)})"


def integer_range(low: int | None, high: int | None) -> str | None:
    """Integers in [low, high], without exponent or fraction; None ends are open. None when there is no such number."""
    if low is None and high is None:
        return ANY_INTEGER
    low, high = -_LARGEST if low is None else low, _LARGEST if high is None else high
    options = []
    if low <= 0 <= high:
        options.append("-?0")
    if high > 0:
        options += _positive_integers(max(low, 1), high)
    if low < 0:
        options += [f"-{part}" for part in _positive_integers(max(-high, 1), -low)]
    return alternatives(options)


def _positive_integers(low: int, high: int) -> list[str]:
    """One expression for every number of digits."""
    parts = []
    for size in range(len(str(low)), len(str(high)) + 1):
        first, last = max(low, 10 ** (size - 1)), min(high, 10**size - 1)
        if first <= last:
            parts.append(_same_length(str(first), str(last)))
    return parts


def _same_length(low: str, high: str) -> str:
    """Digit strings between two of the same length."""
    rest = len(low) - 1
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return _digit(int(low[0]), int(high[0])) + (f"[0-9]{{{rest}}}" if rest else "")
    if low[0] == high[0]:
        return low[0] + _same_length(low[1:], high[1:])
    options = [low[0] + _same_length(low[1:], "9" * rest), high[0] + _same_length("0" * rest, high[1:])]
    if int(high[0]) - int(low[0]) > 1:
        options.append(f"{_digit(int(low[0]) + 1, int(high[0]) - 1)}[0-9]{{{rest}}}")
    return f"(?:{'|'.join(options)})"


def closed_bound(bound: Decimal, included: bool, up: bool) -> Decimal:
    """The closest decimal within a bound, a lower one if `up`, of as many digits as all doubles tell apart.

    Numbers are read as doubles: 0.99999999999999999999 is below 1 and read as 1. What is up to a decimal is read as at
    most what the decimal is read as, and that is within the bound.
    """
    context = Context(prec=_DOUBLE_DIGITS, rounding=ROUND_CEILING if up else ROUND_FLOOR)
    if included:
        return context.plus(bound)
    return context.next_plus(bound) if up else context.next_minus(bound)


def _digit(low: int, high: int) -> str:
    return str(low) if low == high else f"[{low}-{high}]"


def number_range(
    low: Decimal | None, high: Decimal | None, low_included: bool = True, high_included: bool = True
) -> str | None:
    """Decimal numbers in a range, without exponent (with one, order is not that of the digits); None ends are open.

    None when there is no such number.
    """
    if low is None and high is None:
        return ANY_NUMBER
    zero = Decimal(0)
    has_zero = (low is None or low < 0 or (low == 0 and low_included)) and (
        high is None or high > 0 or (high == 0 and high_included)
    )
    options = []
    if high is None or high > 0 or has_zero:
        from_zero = low is None or low < 0
        options += _magnitudes(*((zero, True) if from_zero else (low, low_included)), high, high_included)  # type: ignore[arg-type]
    if low is None or low < 0 or has_zero:
        to_zero = high is None or high >= 0
        start = (zero, has_zero) if to_zero else (-high, high_included)  # type: ignore[operator]
        options += [f"-{part}" for part in _magnitudes(*start, None if low is None else -low, low_included)]
    return alternatives(options)


def _magnitudes(low: Decimal, low_included: bool, high: Decimal | None, high_included: bool) -> list[str]:
    """Decimal numbers >= 0 in a range, by integer part: that of `low`, that of `high`, and those between."""
    first, low_fraction = _split(low)
    last, high_fraction = _split(high) if high is not None else (_LARGEST, None)
    if first > last:
        return []
    if first == last:
        return _with_fraction(first, low_fraction, low_included, high_fraction, high_included)
    options = _with_fraction(first, low_fraction, low_included, None, True)
    middle = integer_range(first + 1, last if high is None else last - 1) if first + 1 <= last else None
    if middle is not None and (high is None or first + 1 <= last - 1):
        options.append(rf"{middle}(?:\.[0-9]{_DIGITS})?")
    if high is not None:
        options += _with_fraction(last, "", True, high_fraction, high_included)
    return options


def _split(value: Decimal) -> tuple[int, str]:
    """Integer part, and the digits behind the point without trailing zeros."""
    whole, _, fraction = f"{value:f}".partition(".")
    return int(whole), fraction.rstrip("0")


def _with_fraction(whole: int, low: str, low_included: bool, high: str | None, high_included: bool) -> list[str]:
    options = []
    if _holds_zero(low, low_included, high, high_included):
        options.append(str(whole))
    digits = _digits_between(low, low_included, high, high_included)
    if digits is not None:
        options.append(rf"{whole}\.{digits}")
    return options


def _holds_zero(low: str, low_included: bool, high: str | None, high_included: bool) -> bool:
    return low == "" and low_included and (high is None or high != "" or high_included)


def _digits_between(low: str, low_included: bool, high: str | None, high_included: bool) -> str | None:
    """One or more digits behind the point whose value lies between `low` and `high` (None: 1, excluded).

    Digits past the end of a bound are zeros.
    """
    if high is None and low == "":
        return f"[0-9]{_DIGITS}" if low_included else _NOT_ZERO
    if high == "" and low == "":
        return f"0{_ZEROS}" if low_included and high_included else None
    smallest, largest = int(low[:1] or 0), 9 if high is None else int(high[:1] or 0)
    by_rest = []
    for digit in range(smallest, largest + 1):
        rest_low = (low[1:], low_included) if digit == smallest else ("", True)
        rest_high = (None, True) if high is None or digit < largest else (high[1:], high_included)
        rest = _digits_between(*rest_low, *rest_high)
        if _holds_zero(*rest_low, *rest_high):
            by_rest.append((digit, f"(?:{rest})?" if rest is not None else ""))
        elif rest is not None:
            by_rest.append((digit, rest))
    options = []
    for rest, group in groupby(by_rest, key=lambda pair: pair[1]):
        found = [digit for digit, _ in group]
        options.append(_digit(found[0], found[-1]) + rest)
    return alternatives(options)
