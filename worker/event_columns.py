"""The fields of many events, checked and converted column by column.

Each column function has a fast way for what nearly every poll holds and a slow one, `_each`, for the rest.
It returns the clean column and, for each row that is wrong, what is wrong; such a row holds a placeholder.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from types import NoneType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

MAX_ID_BYTES = 256
MAX_TIME_MS = 10**14  # the year 5138

# A number is read as seconds, milliseconds or microseconds: below the first, the second, the third.
SECONDS_BELOW, MILLISECONDS_BELOW, MICROSECONDS_BELOW = 10**11, 10**14, 10**17
FLOAT32_BELOW = 2.0**128 - 2.0**103  # from here on a number becomes an infinite float32

_MAX_ID_CHARACTERS = MAX_ID_BYTES // 4  # this many always fit: a character takes at most 4 bytes
_MAX_ID_BITS = 851  # integers of more have over 256 digits
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_OUT_OF_RANGE = "is before 1970 or too large for a time"

T = TypeVar("T")
Problems = dict[int, str]  # row → what is wrong with it


def ids(column: list[Any]) -> tuple[list[str], Problems]:
    """Strings and integers as strings of 1 to 256 bytes."""
    if set(map(type, column)) == {int} and min(column) >= -(2**63) and max(column) < 2**64:
        return list(map(str, column)), {}
    return (column, {}) if _are_short_strings(column) else _each(column, to_id, "")


def optional_ids(column: list[Any]) -> tuple[list[str | None], Problems]:
    """As `ids`; None stays None."""
    if set(map(type, column)) <= {NoneType}:
        return column, {}
    return (column, {}) if _are_short_strings(column) else _each(column, to_optional_id, None)


def codes(column: list[Any], known: Mapping[str, int]) -> tuple[npt.NDArray[np.intp], Problems]:
    """The code of each name; None means "click"."""
    try:
        return np.array([known["click" if name is None else name] for name in column], dtype=np.intp), {}
    except (KeyError, TypeError):  # TypeError: arrays and objects are not hashable
        clean, problems = _each(column, lambda name: to_code(name, known), 0)
        return np.array(clean, dtype=np.intp), problems


def times_ms(column: list[Any], record_times_ms: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], Problems]:
    """Milliseconds since the epoch; where None, the record's own time (negative: it has none)."""
    times, problems = record_times_ms, Problems()
    kinds = set(map(type, column))
    if kinds == {int} and min(column) >= -(2**63) and max(column) < 2**63:
        times = _milliseconds(np.array(column, dtype=np.int64))
    elif kinds - {NoneType}:
        clean, problems = _each(column, to_optional_ms, None)
        absent = np.array([time is None for time in clean], dtype=np.bool_)
        times = np.where(absent, record_times_ms, np.array([time or 0 for time in clean], dtype=np.int64))
    wrong = np.flatnonzero((times < 0) | (times >= MAX_TIME_MS)).tolist()
    return times, dict.fromkeys(wrong, _OUT_OF_RANGE) | problems


def values(column: list[Any]) -> tuple[npt.NDArray[np.float32], Problems]:
    """Finite numbers in 32 bits; None becomes NaN."""
    if set(map(type, column)) <= {NoneType, int, float}:
        try:
            numbers = np.array(column, dtype=np.float64)  # None becomes NaN
        except OverflowError:  # an integer of over 300 digits
            numbers = np.full(len(column), np.inf)
        if np.count_nonzero(np.abs(numbers) < FLOAT32_BELOW) + column.count(None) == len(column):
            return numbers.astype(np.float32), {}
    clean, problems = _each(column, to_value, np.nan)
    return np.array(clean, dtype=np.float32), problems


def to_id(value: object) -> str:
    """The id as a string. Raises ValueError."""
    if type(value) is int:
        text = str(value) if value.bit_length() <= _MAX_ID_BITS else "9" * (MAX_ID_BYTES + 1)
    elif type(value) is str:
        text = value
    else:
        raise ValueError(f"{_kind(value)}, not a string or an integer")
    length = len(text.encode())  # raises for half a surrogate pair: a UnicodeEncodeError is a ValueError
    if not 1 <= length <= MAX_ID_BYTES:
        raise ValueError("is empty" if not length else f"is longer than {MAX_ID_BYTES} bytes")
    return text


def to_optional_id(value: object) -> str | None:
    """As `to_id`, but None stays None. Raises ValueError."""
    return None if value is None else to_id(value)


def to_code(value: object, known: Mapping[str, int]) -> int:
    """The code of an event type; None means "click". Raises ValueError."""
    name = "click" if value is None else value
    if not isinstance(name, str):
        raise ValueError(f"{_kind(value)}, not a string")
    if name not in known:
        raise ValueError(f"{name[:40]!r} is not among the event types of the settings")
    return known[name]


def to_optional_ms(value: object) -> int | None:
    """The time, or None for None. Raises ValueError."""
    if value is None:
        return None
    if type(value) is str:
        return _parsed_ms(value)
    if type(value) is not int and type(value) is not float:
        raise ValueError(f"{_kind(value)}, neither a number nor an ISO-8601 time")
    if not 0 <= value < MICROSECONDS_BELOW:
        raise ValueError(_OUT_OF_RANGE)
    if value < SECONDS_BELOW:
        return round(value * 1000)
    return round(value) if value < MILLISECONDS_BELOW else (int(value) + 500) // 1000


def to_value(value: object) -> float:
    """The number, or NaN for None. Raises ValueError."""
    if value is None:
        return float("nan")
    if type(value) is not int and type(value) is not float:
        raise ValueError(f"{_kind(value)}, not a number")
    if not abs(value) < FLOAT32_BELOW:
        raise ValueError("is not finite in 32 bits")
    return float(value)


def _are_short_strings(column: list[Any]) -> bool:
    if set(map(type, column)) != {str}:
        return False
    try:
        "".join(column).encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    return min(map(len, column)) > 0 and max(map(len, column)) <= _MAX_ID_CHARACTERS


def _milliseconds(times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    # What is negative or past microseconds is left as it is, and so is found out of range.
    seconds = (times >= 0) & (times < SECONDS_BELOW)
    microseconds = (times >= MILLISECONDS_BELOW) & (times < MICROSECONDS_BELOW)
    return np.where(seconds, times * 1000, np.where(microseconds, (times + 500) // 1000, times))


def _parsed_ms(text: str) -> int:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("is no ISO-8601 time") from None
    since = (time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH
    return (since + timedelta(microseconds=500)) // timedelta(milliseconds=1)


def _each(column: list[Any], convert: Callable[[Any], T], placeholder: T) -> tuple[list[T], Problems]:
    clean: list[T] = []
    problems: Problems = {}
    for row, value in enumerate(column):
        try:
            clean.append(convert(value))
        except ValueError as error:
            clean.append(placeholder)
            problems[row] = str(error)
    return clean, problems


def _kind(value: object) -> str:
    kinds = {
        NoneType: "is missing",
        bool: "is a boolean",
        int: "is an integer",
        float: "is a number with a fraction or an exponent",
        str: "is a string",
        list: "is an array",
        dict: "is an object",
    }
    return kinds.get(type(value), "is out of range")
