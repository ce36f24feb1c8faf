"""The window of event ids."""

from hypothesis import given
from hypothesis import strategies as st

from worker.dedup import DedupWindow


@given(st.lists(st.sampled_from("abcdefghij"), max_size=80), st.integers(1, 12))
def test_a_repetition_inside_the_window_is_dropped_and_memory_is_bounded(ids: list[str], size: int) -> None:
    window, remembered = DedupWindow(size), []
    for event_id in ids:
        new = window.first_seen([event_id])[0]
        if event_id in remembered[-size:]:
            assert not new
        if event_id not in remembered[-2 * size :]:
            assert new
        if new:
            remembered.append(event_id)
        assert sum(map(len, window.state().values())) <= 2 * size


def test_events_without_an_id_are_never_repetitions() -> None:
    assert DedupWindow(10).first_seen([None, "a", None, "a"]).tolist() == [True, True, True, False]


def test_a_window_of_nothing_drops_nothing() -> None:
    assert DedupWindow(0).first_seen(["a", "a"]).tolist() == [True, True]


def test_a_saved_window_goes_on() -> None:
    window, again = DedupWindow(3), DedupWindow(3)
    window.first_seen(list("abcd"))
    again.load(window.state())
    assert again.first_seen(list("dcx")).tolist() == [False, False, True]
    assert again.state() == again.state()
