"""Pacing on a clock that the test turns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.pacing import EventTime, FixedRate, Unpaced


class FakeClock:
    """A clock that only moves when somebody sleeps, or by hand."""

    def __init__(self, now: float = 100.0, wakes_early: float = 0.0) -> None:
        self.now = now
        self.wakes_early = wakes_early

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        # at least a nanosecond passes, or a sleeper that always wakes early would never wake
        self.now += max(1e-9, seconds * (1 - self.wakes_early))


def sent_at(pacer: FixedRate | EventTime, clock: FakeClock, times_ms: list[int], work_s: list[float]) -> list[float]:
    """When each event is sent, in seconds after the first, if sending it takes `work_s`."""
    sent = []
    for time_ms, work in zip(times_ms, work_s, strict=True):
        pacer.wait(time_ms)
        sent.append(clock.now)
        clock.now += work
    return [when - sent[0] for when in sent]


def test_a_fixed_rate_sends_each_event_at_its_time() -> None:
    clock = FakeClock()
    pacer = FixedRate(4, clock, clock.sleep)
    assert sent_at(pacer, clock, [0] * 5, [0.0] * 5) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_time_that_sending_takes_does_not_add_up() -> None:
    clock = FakeClock()
    pacer = FixedRate(10, clock, clock.sleep)
    assert sent_at(pacer, clock, [0] * 101, [0.09] * 101)[-1] == pytest.approx(10.0)


def test_what_is_late_is_caught_up_with() -> None:
    clock = FakeClock()
    pacer = FixedRate(1, clock, clock.sleep)
    assert sent_at(pacer, clock, [0] * 6, [0, 3.5, 0, 0, 0, 0]) == [0, 1, 4.5, 4.5, 4.5, 5]


@given(
    rate=st.floats(0.1, 1e5),
    work_s=st.lists(st.floats(0, 10), min_size=1, max_size=50),
    wakes_early=st.floats(0, 0.5),
)
def test_no_event_is_early_and_one_in_time_is_exact(rate: float, work_s: list[float], wakes_early: float) -> None:
    clock = FakeClock(wakes_early=wakes_early)
    sent = sent_at(FixedRate(rate, clock, clock.sleep), clock, [0] * len(work_s), work_s)
    ready = 0.0
    for number, when in enumerate(sent):
        due = number / rate
        assert when == pytest.approx(max(due, ready), abs=1e-6)
        ready = when + work_s[number]


def test_event_time_keeps_the_gaps_divided_by_the_speedup() -> None:
    clock = FakeClock()
    pacer = EventTime(10, clock, clock.sleep)
    times = [5_000, 5_000, 15_000, 16_000]
    assert sent_at(pacer, clock, times, [0.0] * 4) == [0.0, 0.0, 1.0, pytest.approx(1.1)]


def test_event_time_begins_anew_when_the_stream_does() -> None:
    clock = FakeClock()
    pacer = EventTime(1, clock, clock.sleep)
    assert sent_at(pacer, clock, [1_000, 3_000, 1_000, 2_000], [0.0] * 4) == [0.0, 2.0, 2.0, 3.0]


def test_event_time_needs_times() -> None:
    with pytest.raises(ValueError, match="timestamps"):
        EventTime(1).wait(None)


@pytest.mark.parametrize("wrong", [0, -1, float("nan")])
def test_rates_and_speedups_are_above_zero(wrong: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        FixedRate(wrong)
    with pytest.raises(ValueError, match="above 0"):
        EventTime(wrong)


def test_unpaced_asks_no_clock() -> None:
    assert Unpaced().wait(None) is None
