"""The fused score: features against plain arithmetic, weights that find what decides, counts that leave no trace."""

import numpy as np
import torch

from model.cooccurrence import REACH
from model.fusion import EVERYONE, FEATURES, NEAR, Fusion
from model.learner import OnlineLearner
from tests.streams import batch, clustered, small_config

CPU = torch.device("cpu")


def features_by_hand(events: list[tuple[int, list[int]]], history: list[int], item: int) -> list[float]:
    """log(1 + value / ε) of the four pair features; `events` are clicks with the histories before them."""
    after: dict[tuple[int, int], float] = {}
    clicks: dict[int, int] = {}
    for x, before in events:
        clicks[x] = clicks.get(x, 0) + 1
        for k, y in enumerate(before[:REACH]):
            if y != x:
                after[y, x] = after.get((y, x), 0.0) + np.exp(-(k + 1) / 5)
    together = followed = ever = 0.0
    for k, y in enumerate(history[:NEAR]):
        share = (clicks.get(y, 0) + 5) ** -0.7
        both = after.get((y, item), 0.0) + after.get((item, y), 0.0)
        together += 0.8**k * share * both
        followed += 0.8**k * share * after.get((y, item), 0.0)
        ever += share * both
    other = (clicks.get(item, 0) + 5) ** -0.3
    last = after.get((history[0], item), 0.0) / (clicks.get(history[0], 0) + 1) if history else 0.0
    values = np.array([together * other, followed * other, last, ever * other])
    return np.log1p(values / np.array([1e-3, 1e-3, 1e-4, 1e-3])).tolist()


def test_the_score_is_the_weighted_sum_of_the_documented_features() -> None:
    rng = np.random.default_rng(3)
    rows, length = 30, 8
    events = [(int(rng.integers(1, rows)), rng.integers(1, rows, length).tolist()) for _ in range(200)]
    fusion = Fusion(small_config(history=length))
    fusion.grow(rows)
    items, histories = (np.array(column, np.int32) for column in zip(*events, strict=True))
    fusion.count(items, histories, np.arange(1, 201))
    fusion.weights = rng.normal(size=fusion.weights.shape)
    popular, first_seen = rng.random(rows), rng.integers(1, 150, rows)
    fusion.refresh(popular, first_seen, 201)
    asked = np.zeros((5, length), np.int32)
    for n, count in enumerate((0, 1, 4, 5, 8)):
        asked[n, :count] = rng.integers(1, rows, count)
    family = rng.normal(size=(5, rows)).astype(np.float32)
    scores = fusion.scores(family.copy(), asked)
    recent = fusion.recent.counts(rows, 201)
    clicks = np.bincount(items, minlength=rows)
    for n, group in enumerate((0, 1, 1, 2, 2)):
        weights = fusion.weights[EVERYONE] + fusion.weights[group]
        for item in range(1, rows):
            pairs = features_by_hand(events, [i for i in asked[n].tolist() if i], item)
            age = 0.3 * np.log(max(201 - first_seen[item], 1))
            of_item = [age, np.log1p(clicks[item]), np.log(popular[item] + 0.1), np.log(recent[item] + 0.01)]
            expected = float(np.dot(weights, [family[n, item], *pairs, *of_item]))
            assert abs(scores[n, item] - expected) < 5e-3, (n, item)
    assert not fusion._room.sums.any()


def next_of(item: int) -> int:
    return (item * 7 + 3) % 50


def chains(events: int) -> tuple[list[str], list[str]]:
    """Strangers of five clicks each, in which only the last item says what comes next, nine times out of ten."""
    rng = np.random.default_rng(5)
    users, items, at = [], [], 0
    for n in range(events):
        at = int(rng.integers(50)) if n % 5 == 0 or rng.random() < 0.1 else next_of(at)
        users.append(f"u{n // 5}")
        items.append(f"i{at}")
    return users, items


def test_what_follows_what_is_found_by_counts_where_the_family_alone_is_slow() -> None:
    found = {}
    for fused in (False, True):
        learner = OnlineLearner(small_config(family="mf", fusion=fused, fusion_share=1.0), CPU)
        learner.observe(batch(*chains(6000)))
        found[fused] = learner.metrics.report()["recall_at_10_last_half"]
        weights = learner.fusion.weights[EVERYONE] if learner.fusion else None
    assert found[True] > 0.5 > 0.3 > found[False]
    assert weights is not None
    assert weights[FEATURES.index("followed the last")] > 0 or weights[FEATURES.index("followed")] > 0


def test_an_evicted_item_is_a_stranger_again_in_every_count() -> None:
    learner = OnlineLearner(small_config(item_capacity=40, user_capacity=64), CPU)
    learner.observe(clustered(600, items=200))
    fusion = learner.fusion
    assert fusion is not None
    free = [row for row in range(1, learner.items.rows) if learner.items.ids[row] is None]
    assert learner.items.rows <= 42
    for row in free:
        assert len(fusion.pairs.pairs(row)[0]) == 0
        assert fusion._clicks[row] == 0
        assert fusion.recent.counts(learner.items.rows)[row] == 0
    for row in set(range(1, learner.items.rows)) - set(free):
        assert not set(free) & set(fusion.pairs.pairs(row)[0].tolist())
