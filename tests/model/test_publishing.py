"""Published vectors: a dot product that ranks as the full score does, whatever the company they are made in."""

import numpy as np
import pytest
import torch

from model.learner import OnlineLearner
from model.publishing import Best, ItemCodes, best_items, diverse
from tests.streams import batch, clustered, differences, small_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def learner() -> OnlineLearner:
    learner = OnlineLearner(small_config(codes=64), CPU)
    learner.observe(clustered(3000, users=120, items=300))
    return learner


def test_the_dot_product_has_the_best_items_of_the_full_score(learner: OnlineLearner) -> None:
    rows = learner.users.lookup([f"u{n}" for n in range(120)])
    vectors, best = learner.refreshed(rows, 20)
    items = learner.item_vectors()
    assert vectors.shape == (120, learner.readout.dim)
    assert items.shape == (learner.items.rows, learner.readout.dim)
    scores = vectors @ items.T
    rough = learner.rough_vectors(rows) @ items.T
    shared = {"fitted": 0.0, "rough": 0.0}
    for n, row in enumerate(rows):
        seen = learner.log.newest(np.array([row], np.int32), 8)[0]
        for name, ours in (("fitted", scores[n]), ("rough", rough[n])):
            ours[seen] = ours[0] = -np.inf
            shared[name] += len(set(np.argsort(-ours)[:10]) & set(best.items[n, :10])) / 1200
        assert not set(seen) & set(best.items[n])
    assert shared["fitted"] > 0.85
    assert shared["rough"] < shared["fitted"] - 0.1


def test_the_best_items_are_those_of_the_ranked_score_in_order(learner: OnlineLearner) -> None:
    rows = learner.users.lookup(["u7", "nobody"])
    _, best = learner.refreshed(rows, 5)
    history = learner.log.newest(rows, learner.config.history)
    full = learner.readout.scores(torch.from_numpy(rows), history, learner.items.rows).numpy()
    full[0, learner.log.newest(rows[:1], 8)[0]] = -np.inf
    full[:, 0] = -np.inf
    for n in range(2):
        assert best.items[n].tolist() == np.argsort(-full[n], kind="stable")[:5].tolist()
        np.testing.assert_allclose(best.scores[n], -np.sort(-full[n])[:5], rtol=1e-5)


def test_items_left_out_are_not_among_the_best(learner: OnlineLearner) -> None:
    rows = learner.users.lookup(["u7"])
    without = np.zeros(learner.items.rows, np.bool_)
    without[learner.refreshed(rows, 5)[1].items[0]] = True
    assert not without[learner.refreshed(rows, 5, without)[1].items[0]].any()


def test_company_changes_no_more_than_the_last_digits(learner: OnlineLearner) -> None:
    rows = learner.users.lookup([f"u{n}" for n in range(120)])
    together = learner.refreshed(rows)[0]
    alone = np.concatenate([learner.refreshed(rows[n : n + 1])[0] for n in range(120)])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_fewer_items_than_are_asked_for_are_enough() -> None:
    few = OnlineLearner(small_config(), CPU)
    few.observe(batch(["a", "b", "a"], ["x", "y", "z"]))
    few.learn()
    vectors, best = few.refreshed(few.users.lookup(["a", "b", "c"]), 10)
    assert np.isfinite(vectors).all()
    names = [[few.items.ids[row] for row in rows if row] for rows in best.items]
    assert sorted(names[0]) == ["y"]
    assert sorted(names[1]) == ["x", "z"]
    assert sorted(names[2]) == ["x", "y", "z"]
    assert few.refreshed(np.empty(0, np.int32), 10)[0].shape == (0, few.readout.dim)


def test_a_row_has_the_same_code_in_every_life_however_many_there_are() -> None:
    codes = ItemCodes(16, seed=3)
    few = codes.first(10).copy()
    np.testing.assert_array_equal(codes.first(5000)[:10], few)
    np.testing.assert_array_equal(ItemCodes(16, seed=3).first(5000), codes.first(5000))
    assert (ItemCodes(16, seed=4).first(10) != few).any()
    np.testing.assert_allclose(np.linalg.norm(codes.first(5000), axis=1), 1.0, rtol=1e-6)


def test_minus_infinity_is_never_among_the_best() -> None:
    scores = torch.tensor([[0.0, float("-inf"), 2.0], [float("-inf")] * 3])
    best = best_items(scores, 4)
    assert best.items.tolist() == [[2, 0, 0, 0], [0, 0, 0, 0]]


def test_diversity_takes_the_best_first_and_then_what_is_unlike_it() -> None:
    items = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.01], [0.0, 1.0], [0.7, 0.7]])
    best = Best(np.array([[1, 2, 3, 4, 0]], np.int32), np.array([[4.0, 3.9, 2.0, 1.0, 0.0]], np.float32))
    assert diverse(best, items, 3, 1e-6).items.tolist() == [[1, 2, 3]]
    chosen = diverse(best, items, 3, 0.8)
    assert chosen.items.tolist() == [[1, 3, 4]]
    assert chosen.scores.tolist() == [[4.0, 2.0, 1.0]]
    assert diverse(best, items, 5, 0.8).items[0].tolist()[-1] == 0  # where there are no more


def test_more_diversity_makes_lists_less_alike(learner: OnlineLearner) -> None:
    rows = learner.users.lookup([f"u{n}" for n in range(120)])
    alike = []
    for diversity in (0.0, 0.3, 0.8):
        vectors = learner.item_vectors()[:, :8]
        chosen = vectors[learner.refreshed(rows, 10, diversity=diversity)[1].items[:, :10]]
        chosen /= np.linalg.norm(chosen, axis=2, keepdims=True)
        alike.append(float((chosen @ chosen.transpose(0, 2, 1)).mean()))
    assert alike[0] > alike[1] > alike[2]


def test_when_vectors_are_made_and_when_a_worker_was_restarted_leaves_no_trace_in_what_is_learned() -> None:
    events = clustered(700, users=40, items=60)
    quiet, busy = (OnlineLearner(small_config(popularity_half_life=50), CPU) for _ in range(2))
    quiet.observe(events)
    for start in range(0, 700, 3):
        busy.observe(events.part(start, start + 3))
        busy.refreshed(busy.users.lookup(["u1"]))
        busy.item_vectors()
        if start % 5 == 0:
            resumed = OnlineLearner(small_config(popularity_half_life=50), CPU)
            resumed.load(busy.state())
            busy = resumed
    assert differences(quiet.state(), busy.state()) == []
