"""Ranks and figures against the definition, one event at a time."""

import math

import numpy as np
import pytest
import torch

from model.batch import PastEvents
from model.metrics import Curve
from model.popularity import Popularity
from model.ranking import rank
from tests.streams import differences

rng = np.random.default_rng(5)
EVENTS, ITEMS = 60, 30


def stream() -> tuple[PastEvents, np.ndarray, list[set[int]]]:
    """Events with the items' first appearances and what each user had seen before."""
    users, items = rng.integers(1, 5, EVENTS), rng.integers(1, ITEMS, EVENTS)
    first_seen = np.full(ITEMS, np.iinfo(np.int64).max)
    seen: dict[int, set[int]] = {}
    before = []
    for n, (user, item) in enumerate(zip(users, items, strict=True), start=1):
        before.append(set(seen.setdefault(user, set())))
        seen[user].add(item)
        first_seen[item] = min(first_seen[item], n)
    sequence = np.arange(1, EVENTS + 1)
    events = PastEvents(users.astype(np.int32), items.astype(np.int32), sequence, np.ones(EVENTS, np.float32), sequence)
    return events, first_seen, before


def flat(before: list[set[int]]) -> tuple[np.ndarray, np.ndarray]:
    items = [i for seen in before for i in sorted(seen)]
    return np.array(items, np.int32), np.cumsum([len(seen) for seen in before])


def expected(item: int, n: int, scores: np.ndarray, first_seen: np.ndarray, seen: set[int]) -> int:
    candidates = [i for i in range(1, ITEMS) if first_seen[i] < n and i not in seen]
    if item not in candidates:
        return -1
    order = sorted(candidates, key=lambda i: (-scores[i], first_seen[i]))
    return order.index(item)


def test_ranks_follow_the_protocol() -> None:
    """Candidates appeared before and are unseen; a tie goes to the earlier item; new and seen items are misses."""
    events, first_seen, before = stream()
    users = torch.randint(0, 2, (EVENTS, 3)).float()  # few values: many ties
    items = torch.randint(0, 2, (ITEMS, 3)).float()
    ranks, _ = rank(users @ items.T, events, torch.from_numpy(first_seen), flat(before))
    scores = (users @ items.T).numpy()
    wanted = [expected(int(i), n + 1, scores[n], first_seen, before[n]) for n, i in enumerate(events.items)]
    assert ranks.tolist() == wanted
    assert -1 in wanted
    assert max(wanted) > 5


def test_the_best_rows_are_those_that_come_first_by_score() -> None:
    events, first_seen, before = stream()
    users, items = torch.randn(EVENTS, 3), torch.randn(ITEMS, 3)
    _, best = rank(users @ items.T, events, torch.from_numpy(first_seen), flat(before), 10)
    scores = (users @ items.T).numpy()
    for n in range(EVENTS):
        candidates = [i for i in range(1, ITEMS) if first_seen[i] < n + 1 and i not in before[n]]
        wanted = sorted(candidates, key=lambda i: -scores[n][i])[:10]
        assert best[n].tolist() == wanted + [0] * (10 - len(wanted))


def test_popularity_is_ranked_by_the_clicks_so_far_and_halves_with_its_half_life() -> None:
    events, first_seen, before = stream()
    popularity = Popularity(half_life=7)
    popularity.grow(ITEMS)
    yes = np.ones(EVENTS, np.bool_)
    ranks = np.concatenate([
        popularity.rank_and_add(
            events.items[part], yes[part], events.sequence[part], first_seen, flat(before[part]), yes[part]
        )
        for part in (slice(0, 23), slice(23, EVENTS))
    ])  # fmt: skip
    clicks = np.zeros(ITEMS)
    for n, item in enumerate(events.items):
        clicks *= 0.5 ** (1 / 7)
        order = expected(int(item), n + 1, clicks.round(9), first_seen, before[n])
        assert ranks[n] == order
        clicks[item] += 1
    np.testing.assert_allclose(popularity.counts(ITEMS), clicks, rtol=1e-9)


def test_popularity_does_not_overflow_in_a_long_life() -> None:
    popularity = Popularity(half_life=1)
    popularity.grow(3)
    none = (np.empty(0, np.int32), np.zeros(1, np.int64))
    for n in range(1, 5000, 7):
        one, yes = np.array([1 + n % 2], np.int32), np.array([True])
        popularity.rank_and_add(one, yes, np.array([n]), np.array([0, 0, 0]), none, yes)
    counts = popularity.counts(3)
    assert np.isfinite(counts).all()
    assert counts.max() == pytest.approx(1.0, rel=0.01)


def test_figures_of_any_stretch() -> None:
    ranks = rng.integers(-1, 25, 10_000)
    curve = Curve(window=300)
    for part in np.array_split(ranks, 37):
        curve.add(part)
    hits = (ranks >= 0) & (ranks < 10)
    gains = np.array([1 / math.log2(r + 2) if 0 <= r < 10 else 0.0 for r in ranks])
    assert curve.mean()["recall_at_10"] == pytest.approx(hits.mean())
    assert curve.mean()["ndcg_at_10"] == pytest.approx(gains.mean())
    assert curve.mean()["mrr_at_10"] == pytest.approx(np.where(hits, 1 / (np.abs(ranks) + 1.0), 0).mean())
    assert curve.mean(0.5)["recall_at_10"] == pytest.approx(hits[5000:].mean(), abs=1e-3)  # a block is cut
    assert curve.windowed()["recall_at_10"] == pytest.approx(hits[-300:].mean())


def test_a_saved_curve_is_the_same_curve() -> None:
    curve, again = Curve(50), Curve(50)
    curve.add(rng.integers(-1, 25, 9000))
    again.load(curve.state())
    more = rng.integers(-1, 25, 77)
    curve.add(more)
    again.add(more)
    assert differences(curve.state(), again.state()) == []
    assert again.mean(0.5) == curve.mean(0.5)


def test_no_events_are_no_error() -> None:
    assert Curve(10).mean(0.5)["recall_at_10"] == 0.0
    assert Curve(10).windowed()["ndcg_at_10"] == 0.0
