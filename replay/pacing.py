"""When each event is sent: as fast as possible, at a fixed rate, or as its own time says.

Each event has a due time that is counted from the first one, so that waits that end late and events that
take long do not add up to drift: what is late is caught up with.
"""

import time
from collections.abc import Callable
from typing import Protocol

Clock = Callable[[], float]  # seconds, never going back
Sleep = Callable[[float], None]


class Pacer(Protocol):
    """Waits until the next event may be sent."""

    def wait(self, timestamp_ms: int | None, /) -> None:
        """Return when the next event, which happened at `timestamp_ms`, is due."""
        ...


class Unpaced:
    """As fast as possible."""

    def wait(self, _timestamp_ms: int | None, /) -> None:
        """Return at once."""


class FixedRate:
    """Event n is due n / rate seconds after the first."""

    def __init__(self, rate: float, clock: Clock = time.monotonic, sleep: Sleep = time.sleep) -> None:
        """`rate` is in events per second; ValueError unless it is above 0."""
        if not rate > 0:
            raise ValueError(f"rate must be above 0 events per second, not {rate:g}")
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._start: float | None = None
        self._count = 0

    def wait(self, _timestamp_ms: int | None, /) -> None:
        if self._start is None:
            self._start = self._clock()
        _sleep_until(self._start + self._count / self._rate, self._clock, self._sleep)
        self._count += 1


class EventTime:
    """An event that happened t seconds after the first one is due t / speedup seconds after it.

    Where event time jumps back (the stream begins again), counting starts anew from there.
    """

    def __init__(self, speedup: float, clock: Clock = time.monotonic, sleep: Sleep = time.sleep) -> None:
        """ValueError unless `speedup` is above 0."""
        if not speedup > 0:
            raise ValueError(f"speedup must be above 0, not {speedup:g}")
        self._speedup = speedup
        self._clock = clock
        self._sleep = sleep
        self._origin: tuple[float, int] | None = None  # clock and event time of the first event
        self._newest_ms = 0

    def wait(self, timestamp_ms: int | None, /) -> None:
        """ValueError for an event without a time."""
        if timestamp_ms is None:
            raise ValueError("a speedup needs events with timestamps")
        if self._origin is None or timestamp_ms < self._newest_ms:
            self._origin = self._clock(), timestamp_ms
        self._newest_ms = timestamp_ms
        start, first_ms = self._origin
        due = start + (timestamp_ms - first_ms) / 1000 / self._speedup
        _sleep_until(due, self._clock, self._sleep)


def _sleep_until(due: float, clock: Clock, sleep: Sleep) -> None:
    # a sleep may end early; an event must not
    while (left := due - clock()) > 0:
        sleep(left)
