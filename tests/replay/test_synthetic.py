"""The made-up stream holds what it plants."""

from collections import Counter
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.datasets import DatasetError, Interaction
from replay.datasets.synthetic import Synthetic

SMALL = Synthetic(20_000, n_users=500, n_items=1_000, n_clusters=5)


def share_in_own_cluster(stream: Synthetic, start: int, stop: int) -> float:
    events = list(enumerate(islice(stream.interactions(start), stop - start), start))
    own = sum(stream.cluster_of_item(e.item) == stream.cluster_of_user(e.user, n) for n, e in events)
    return own / len(events)


def test_the_same_arguments_give_the_same_stream_and_another_seed_another() -> None:
    events = list(SMALL.interactions())
    assert events == list(Synthetic(20_000, n_users=500, n_items=1_000, n_clusters=5).interactions())
    assert events != list(Synthetic(20_000, n_users=500, n_items=1_000, n_clusters=5, seed=1).interactions())


def test_a_stream_can_be_read_from_anywhere() -> None:
    stream = Synthetic(140_000)  # more than two of the blocks that are drawn at once
    everything = list(stream.interactions())
    assert len(everything) == len(stream) == 140_000
    for start in (0, 1, 65_536, 139_999, 140_000):
        assert list(stream.interactions(start)) == everything[start:]


def test_most_clicks_go_to_the_users_own_cluster() -> None:
    # the noise that hits the own cluster by chance, too: .9 + .1 / 5
    assert share_in_own_cluster(SMALL, 0, 20_000) == pytest.approx(0.92, abs=0.02)


def test_without_focus_there_is_nothing_to_find() -> None:
    stream = Synthetic(20_000, n_users=500, n_items=1_000, n_clusters=5, focus=0.0)
    assert share_in_own_cluster(stream, 0, 20_000) == pytest.approx(0.2, abs=0.02)


def test_tastes_change_at_the_drift_and_only_there() -> None:
    stream = Synthetic(20_000, n_users=500, n_items=1_000, n_clusters=5, drift_at=10_000)
    assert (stream.user_clusters != stream.drifted_user_clusters).all()
    for start in (0, 10_000):
        assert share_in_own_cluster(stream, start, start + 10_000) == pytest.approx(0.92, abs=0.03)
    events = list(stream.interactions(10_000))
    before = sum(stream.cluster_of_item(e.item) == stream.cluster_of_user(e.user) for e in events) / len(events)
    assert before < 0.1


def test_of_several_drifts_each_is_for_a_group_of_its_own() -> None:
    stream = Synthetic(20_000, n_users=500, n_items=1_000, n_clusters=5, drift_at=(5_000, 10_000, 15_000))
    for user in range(6):
        moment = (5_000, 10_000, 15_000)[user % 3]
        before, after = (stream.cluster_of_user(f"u{user}", moment + n) for n in (-1, 0))
        assert (before, after) == (stream.user_clusters[user], stream.drifted_user_clusters[user])
        assert before != after
    assert share_in_own_cluster(stream, 0, 20_000) == pytest.approx(0.92, abs=0.03)


def test_events_are_as_far_apart_as_is_wanted_within_a_year() -> None:
    for n_events, interval_s, apart_ms in ((100, 1.0, 1_000), (100, 90.0, 90_000), (3_650, 86_400.0, 8_640_000)):
        times = [e.timestamp_ms for e in islice(Synthetic(n_events, interval_s=interval_s).interactions(), 3)]
        assert [b - a for a, b in pairwise(times)] == [apart_ms] * 2


def test_popular_items_get_most_clicks_and_uniform_ones_do_not() -> None:
    def share_of_top_tenth(zipf: float) -> float:
        stream = Synthetic(20_000, n_users=5_000, n_items=500, n_clusters=5, zipf=zipf, present=1.0)
        clicks = Counter(event.item for event in stream.interactions())
        return sum(count for _, count in clicks.most_common(50)) / 20_000

    assert share_of_top_tenth(1.0) > 2 * share_of_top_tenth(0.0)


def test_users_and_items_appear_while_the_stream_runs() -> None:
    events = list(SMALL.interactions())
    for column, total in ((0, 500), (1, 1_000)):
        early = {int(event[column][1:]) for event in events[:5_000]}
        late = {int(event[column][1:]) for event in events[15_000:]}
        # half are there at first, and they grow evenly to all
        assert max(early) < total * 0.63
        assert max(late) > total * 0.9


def test_users_do_not_click_an_item_twice_unless_told() -> None:
    pairs = Counter((event.user, event.item) for event in SMALL.interactions())
    assert sum(pairs.values()) - len(pairs) < 0.005 * 20_000


def test_repeats_go_to_the_users_last_item() -> None:
    last: dict[str, str] = {}
    repeated = 0
    for event in Synthetic(20_000, n_users=500, n_items=1_000, n_clusters=5, repeats=0.3).interactions():
        repeated += last.get(event.user) == event.item
        last[event.user] = event.item
    assert repeated / 20_000 == pytest.approx(0.3, abs=0.02)


def test_sessions_are_clicks_in_a_row_and_uniform_mode_has_none() -> None:
    def share_in_a_row(stream: Synthetic) -> float:
        users = [event.user for event in stream.interactions()]
        return sum(a == b for a, b in pairwise(users)) / len(users)

    assert share_in_a_row(SMALL) == pytest.approx(1 - 1 / 8, abs=0.02)
    assert share_in_a_row(Synthetic(20_000, n_users=500, mode="uniform")) < 0.02


def test_times_grow_and_can_be_looked_up() -> None:
    times = [event.timestamp_ms for event in SMALL.interactions()]
    assert times == sorted(times)
    assert SMALL.index_at(times[1234]) == 1234
    assert SMALL.index_at(times[1234] + 1) == 1235
    assert SMALL.index_at(10**14) == 20_000


@given(
    n_events=st.integers(1, 300),
    n_users=st.integers(1, 50),
    n_clusters=st.integers(1, 10),
    more_items=st.integers(0, 50),
    seed=st.integers(0, 2**32),
    present=st.floats(0, 1),
    repeats=st.floats(0, 1),
    mode=st.sampled_from(["sessions", "uniform"]),
)
def test_every_event_is_by_a_user_and_for_an_item_that_exist(
    n_events: int, n_users: int, n_clusters: int, more_items: int, seed: int, present: float, repeats: float, mode: str
) -> None:
    stream = Synthetic(
        n_events,
        n_users,
        n_clusters + more_items,
        n_clusters,
        seed,
        present=present,
        repeats=repeats,
        mode=mode,  # type: ignore[arg-type]
    )
    events = list(stream.interactions())
    assert len(events) == n_events
    known = {item.item_id for item in stream.items()}
    assert len(known) == n_clusters + more_items
    for event in events:
        assert isinstance(event, Interaction)
        assert 0 <= int(event.user[1:]) < n_users
        assert event.item in known


@pytest.mark.parametrize("wrong", [
    {"n_events": 0},
    {"n_users": 0},
    {"n_items": 3, "n_clusters": 4},
    {"repeats": 1.5},
    {"focus": -0.1},
    {"session": 0.5},
    {"n_clusters": 1, "drift_at": 5},
])  # fmt: skip
def test_sizes_that_make_no_stream_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(DatasetError, match="synthetic stream"):
        Synthetic(**wrong)  # type: ignore[arg-type]
