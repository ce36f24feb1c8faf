"""Sparse counts of what is clicked together: against plain dictionaries, at the limit, and through eviction."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.cooccurrence import REACH, SMALLEST, Cooccurrence
from tests.streams import differences

ITEMS = 40
clicks = st.lists(
    st.tuples(st.integers(0, ITEMS), st.lists(st.integers(0, ITEMS), max_size=6)), min_size=1, max_size=80
)


def columns(events: list[tuple[int, list[int]]]) -> tuple[np.ndarray, np.ndarray]:
    history = np.zeros((len(events), 6), np.int32)
    for row, (_, before) in zip(history, events, strict=True):
        row[: len(before)] = before
    return np.array([item for item, _ in events], np.int32), history


def by_hand(events: list[tuple[int, list[int]]]) -> dict[int, dict[int, list[float]]]:
    """item -> other item -> [clicks of the other after it, before it]"""
    found: dict[int, dict[int, list[float]]] = {}
    for x, before in events:
        for k, y in enumerate(before[:REACH]):
            if x and y and x != y:
                found.setdefault(y, {}).setdefault(x, [0.0, 0.0])[0] += np.exp(-(k + 1) / 5)
                found.setdefault(x, {}).setdefault(y, [0.0, 0.0])[1] += np.exp(-(k + 1) / 5)
    return found


def made(events: list[tuple[int, list[int]]], neighbours: int = 1024) -> Cooccurrence:
    counts = Cooccurrence(neighbours)
    counts.grow(ITEMS + 1)
    counts.add(*columns(events))
    return counts


def assert_counts(counts: Cooccurrence, expected: dict[int, dict[int, list[float]]]) -> None:
    for item in range(ITEMS + 1):
        others, weights = counts.pairs(item)
        pairs = expected.get(item, {})
        assert others.tolist() == sorted(pairs)
        np.testing.assert_allclose(weights, [pairs[other] for other in sorted(pairs)] or np.empty((0, 2)), rtol=1e-5)


@given(clicks)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_each_pair_counts_once_on_both_sides_and_fades_with_the_clicks_between(events: list) -> None:
    assert_counts(made(events), by_hand(events))


@given(clicks, st.integers(0, 80))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_counts_do_not_depend_on_how_clicks_are_grouped_or_on_a_restart(events: list, cut: int) -> None:
    whole = made(events)
    parts = made(events[:cut]) if cut else Cooccurrence(1024)
    parts.grow(ITEMS + 1)
    resumed = Cooccurrence(1024)
    resumed.load(parts.state(ITEMS + 1))
    for half in (parts, resumed):
        if events[cut:]:
            half.add(*columns(events[cut:]))
        assert differences(half.state(ITEMS + 1), whole.state(ITEMS + 1)) == []


@given(clicks, st.sets(st.integers(1, ITEMS)), clicks)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_an_evicted_item_leaves_no_pair_behind_and_its_row_starts_anew(first: list, evicted: set, then: list) -> None:
    counts = made(first)
    counts.forget(np.array(sorted(evicted), np.int32), ITEMS + 1)
    left = {
        item: {other: pair for other, pair in pairs.items() if other not in evicted}
        for item, pairs in by_hand(first).items()
        if item not in evicted
    }
    assert_counts(counts, left)
    counts.add(*columns(then))
    for item, pairs in by_hand(then).items():
        for other, (after, before) in pairs.items():
            there = left.setdefault(item, {}).setdefault(other, [0.0, 0.0])
            left[item][other] = [there[0] + after, there[1] + before]
    assert_counts(counts, left)


def test_a_full_row_loses_its_weakest_quarter_and_the_memory_stays_bounded() -> None:
    counts = Cooccurrence(32)
    counts.grow(5000)
    often = np.arange(2, 12, dtype=np.int32)
    for n in range(400):  # ten that come again and again, and four thousand strangers
        strangers = np.arange(12 + 10 * n, 22 + 10 * n, dtype=np.int32)
        counts.add(np.concatenate([often, strangers]), np.ones((20, 1), np.int32))
    others, weights = counts.pairs(1)
    assert set(often) <= set(others.tolist())
    assert len(others) < 32
    assert counts.size[1] == 32
    np.testing.assert_allclose(weights[np.isin(others, often), 0], 400 * np.exp(-0.2), rtol=1e-4)
    arena = len(counts.keys)
    counts.add(np.tile(often, 50), np.ones((500, 1), np.int32))
    assert len(counts.keys) == arena


def test_blocks_of_evicted_items_are_used_again() -> None:
    counts = Cooccurrence(SMALLEST * 4)
    counts.grow(200)
    for _ in range(50):
        counts.add(np.arange(1, 100, dtype=np.int32), np.arange(101, 200, dtype=np.int32).reshape(-1, 1))
        used = int(counts.state(200)["free"][0])
        counts.forget(np.arange(1, 200, dtype=np.int32), 200)
    counts.add(np.arange(1, 100, dtype=np.int32), np.arange(101, 200, dtype=np.int32).reshape(-1, 1))
    assert int(counts.state(200)["free"][0]) == used
