"""Waiting for a condition instead of sleeping."""

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def eventually(condition: Callable[[], Value], timeout_s: float = 60.0, what: str | Callable[[], str] = "") -> Value:
    """The first true value of `condition`, asked again and again; AssertionError that says what never came.

    An AssertionError, OSError or LookupError inside the condition counts as "not yet".
    """
    deadline = time.monotonic() + timeout_s
    last: object = None
    while True:
        try:
            if last := condition():
                return last
        except (AssertionError, OSError, LookupError) as error:
            last = error
        if time.monotonic() > deadline:
            name = (
                (what() if callable(what) else what)
                or getattr(condition, "__doc__", None)
                or getattr(condition, "__name__", "the condition")
            )
            raise AssertionError(f"not within {timeout_s:g} s: {name} (last: {last!r})")
        time.sleep(0.005)
