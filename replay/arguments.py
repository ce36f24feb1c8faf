"""Types of command-line arguments: each says what is allowed."""

import argparse
import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

from replay.datasets import delimited, item_file

_Number = TypeVar("_Number", int, float)


def _number(kind: Callable[[str], _Number], right: Callable[[_Number], bool], allowed: str) -> Callable[[str], _Number]:
    def parse(text: str) -> _Number:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not right(value):
            raise argparse.ArgumentTypeError(f"must be {allowed}, not {text!r}")
        return value

    return parse


positive = _number(int, lambda value: value >= 1, "a whole number from 1")
natural = _number(int, lambda value: value >= 0, "a whole number from 0")
above_zero = _number(float, lambda value: 0 < value < math.inf, "a number above 0")
finite = _number(float, math.isfinite, "a number")


def naturals(text: str) -> tuple[int, ...]:
    """Whole numbers from 0, separated by commas."""
    return tuple(natural(number) for number in text.split(","))


def start(text: str) -> int | datetime:
    """A number of an event, or a time; UTC unless it says otherwise."""
    if text.isdecimal():
        return int(text)
    try:
        given = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor an ISO-8601 time") from None
    return given if given.tzinfo else given.replace(tzinfo=UTC)


def columns(text: str) -> dict[str, str]:
    """A column map."""
    try:
        return delimited.parse_columns(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def item_columns(text: str) -> dict[str, str]:
    """A column map of a file of items."""
    try:
        return item_file.parse_item_columns(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def delimiter(text: str) -> str:
    r"""A delimiter; `\t` is a tab."""
    return text.replace("\\t", "\t")


def codec(text: str) -> str | None:
    """A compression codec; None for `none`."""
    if text not in ("lz4", "zstd", "gzip", "snappy", "none"):
        raise argparse.ArgumentTypeError("lz4, zstd, gzip, snappy or none")
    return None if text == "none" else text
