"""Which users wait to be published, and for how long."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker.outbox import PublishedItems, TouchedUsers, positions_from_json, positions_json
from worker.source import Partition

marks = st.lists(st.lists(st.integers(1, 3000), max_size=20), max_size=30)


def rows(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


@given(marks, st.integers(1, 50))
def test_each_user_waits_once_in_order_of_its_first_mark(polls: list[list[int]], count: int) -> None:
    queue, times = TouchedUsers(), []
    for n, poll in enumerate(polls):
        queue.mark(rows(poll), np.full(len(poll), n))
    order = list(dict.fromkeys(user for poll in polls for user in poll))
    assert len(queue) == len(order)
    taken = []
    while len(queue):
        part, its_times = queue.take(count)
        assert len(part) <= count
        taken += part.tolist()
        times += its_times.tolist()
    times += queue.take(count)[1].tolist()
    assert taken == order
    assert times == [n for n, poll in enumerate(polls) for _ in poll]  # each event's time, once


@given(marks, st.sets(st.integers(1, 3000)))
def test_an_evicted_user_waits_no_longer(polls: list[list[int]], evicted: set[int]) -> None:
    queue = TouchedUsers()
    for poll in polls:
        queue.mark(rows(poll), np.zeros(len(poll), np.int64))
    queue.drop(rows(sorted(evicted)))
    order = [user for user in dict.fromkeys(user for poll in polls for user in poll) if user not in evicted]
    assert queue.rows().tolist() == order
    assert len(queue) == len(order)
    queue.mark(rows(sorted(evicted)[:1]), np.zeros(0, np.int64))  # and may wait again
    assert queue.rows().tolist() == order + sorted(evicted)[:1]


def test_an_outage_costs_one_entry_a_user_and_a_bounded_number_of_times() -> None:
    queue = TouchedUsers()
    for n in range(3000):
        queue.mark(rows([1 + n % 100] * 10), np.full(10, n))
    assert len(queue) == 100
    assert len(queue._parts) <= 1001
    users, times = queue.take(1000)
    assert sorted(users.tolist()) == list(range(1, 101))
    assert len(times) == 30_000


def test_positions_are_published_as_plain_json() -> None:
    positions = {Partition("clicks", 1): 7, Partition("clicks", 0): 5, Partition("ü", 0): 2**40}
    text = positions_json(positions)
    assert json.loads(text) == {"clicks": {"0": 5, "1": 7}, "ü": {"0": 2**40}}
    assert positions_from_json(text) == positions
    assert positions_from_json(b"") == {}


def test_items_go_out_again_when_they_were_clicked_or_moved_by_more_than_the_tolerance() -> None:
    there, vectors, clicks = PublishedItems(), np.ones((4, 3), np.float32), np.array([0, 5, 5, 5])
    everything = rows([0, 1, 2, 3])
    assert there.changed(vectors, clicks, 0.01).tolist() == everything.tolist()
    there.note(everything, vectors, clicks)
    assert there.changed(vectors, clicks, 0.01).tolist() == []
    clicks = clicks + np.array([0, 1, 0, 0])  # its vector hardly moved, but readers see the count
    vectors = vectors * np.array([[1], [1.001], [1.001], [1.1]], np.float32)
    assert there.changed(vectors, clicks, 0.01).tolist() == [1, 3]
    there.forget(rows([2, 9000]))
    assert there.changed(vectors, clicks, 0.01).tolist() == [1, 2, 3]
    there.clear()
    assert there.changed(vectors, clicks, 0.01).tolist() == everything.tolist()
