"""Click logs against a plain list a user."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from model.history import ClickLog
from tests.streams import differences

USERS, ITEMS, LIMIT, LENGTH = 6, 20, 40, 7

clicks = st.lists(st.tuples(st.integers(1, USERS), st.integers(1, ITEMS), st.booleans()), min_size=1, max_size=400)


def filled(events: list[tuple[int, int, bool]], log: ClickLog) -> np.ndarray:
    log.grow(USERS + 1)
    users, items, observe = (np.array(column) for column in zip(*events, strict=True))
    return log.append(users.astype(np.int32), items.astype(np.int32), observe)


@settings(max_examples=60, deadline=None)
@given(clicks)
def test_a_log_holds_the_newest_clicks_in_order(events: list[tuple[int, int, bool]]) -> None:
    log, plain = ClickLog(LIMIT), {user: [] for user in range(USERS + 1)}
    positions = filled(events, log)
    for (user, item, observe), position in zip(events, positions, strict=True):
        assert position == len(plain[user])  # = how many were there before
        if observe:
            plain[user].append(item)
    users = np.arange(USERS + 1, dtype=np.int32)
    for user, row in zip(users, log.newest(users, LENGTH), strict=True):
        newest = plain[user][::-1][:LENGTH]
        assert row.tolist() == newest + [0] * (LENGTH - len(newest))
    items, ends = log.before(users, log.count[users])
    for user, part in zip(users, np.split(items, ends[:-1]), strict=True):
        assert part.tolist() == plain[user][-LIMIT:]


@settings(max_examples=40, deadline=None)
@given(clicks, st.data())
def test_a_past_position_names_the_history_before_it(events: list[tuple[int, int, bool]], data: st.DataObject) -> None:
    log, plain = ClickLog(10_000), {user: [] for user in range(USERS + 1)}
    positions = filled(events, log)
    n = data.draw(st.integers(0, len(events) - 1))
    for user, item, observe in events[:n]:
        if observe:
            plain[user].append(item)
    user = events[n][0]
    window = log.window(np.array([user], np.int32), positions[n : n + 1], LENGTH)[0]
    assert window[window > 0].tolist() == plain[user][::-1][:LENGTH]


@settings(max_examples=40, deadline=None)
@given(clicks, st.sets(st.integers(1, ITEMS)), st.sets(st.integers(1, USERS)), clicks)
def test_evicted_items_and_users_are_in_no_log(
    events: list[tuple[int, int, bool]], items: set[int], users: set[int], later: list[tuple[int, int, bool]]
) -> None:
    log, plain = ClickLog(LIMIT), {user: [] for user in range(USERS + 1)}
    filled(events, log)
    log.forget_users(np.array(sorted(users), np.int32))
    log.forget_items(np.array(sorted(items), np.int32), ITEMS + 1)
    filled(later, log)  # blocks and rows are used again
    for user, item, observe in events:
        if observe:
            plain[user].append(0 if item in items else item)
    for user in users:
        plain[user] = []
    for user, item, observe in later:
        if observe:
            plain[user].append(item)
    everyone = np.arange(1, USERS + 1, dtype=np.int32)
    flat, ends = log.before(everyone, log.count[everyone])
    for user, part in zip(everyone, np.split(flat, ends[:-1]), strict=True):
        assert part.tolist() == [item for item in plain[user][-LIMIT:] if item]


def test_a_saved_log_is_the_same_log() -> None:
    rng = np.random.default_rng(0)
    events = [(int(u), int(i), True) for u, i in zip(rng.integers(1, 7, 900), rng.integers(1, 21, 900), strict=True)]
    log, again = ClickLog(LIMIT), ClickLog(LIMIT)
    filled(events[:500], log)
    again.load(log.state(USERS + 1))
    for one in (log, again):
        filled(events[500:], one)
    assert differences(log.state(USERS + 1), again.state(USERS + 1)) == []


def test_many_small_logs_take_little_memory() -> None:
    log = ClickLog(1000)
    log.grow(100_001)
    users = np.arange(1, 100_001, dtype=np.int32)
    log.append(users, np.ones_like(users), np.ones(len(users), np.bool_))
    assert log.arena.nbytes < 100_000 * 8 * 4 * 1.6  # one block of 8 entries each, grown by halves
