"""The recent interaction graph between items, and what the family that aggregates it makes of it."""

import numpy as np
import pytest
import torch

from model.families.gnn import NEIGHBOURS, NeighbourAggregation
from model.graph import ItemGraph
from model.learner import OnlineLearner
from tests.streams import batch, clustered, small_config


def rows(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_both_items_of_a_pair_become_neighbours_and_the_oldest_makes_room() -> None:
    graph = ItemGraph(width=2)
    changed = graph.join(rows(1, 2, 3), np.array([[2, 0], [1, 4], [1, 3]], np.int32))
    assert graph.near[1].tolist() == [3, 2]  # 2, then 2 again, then 3 in place of the first
    assert graph.near[4].tolist() == [2, 0]
    assert graph.count[:5].tolist() == [0, 3, 3, 1, 1]  # an item is no neighbour of itself
    assert set(changed.tolist()) == {0, 1, 2, 3, 4}


def test_the_rings_do_not_depend_on_how_the_events_were_grouped() -> None:
    rng = np.random.default_rng(0)
    items, before = rng.integers(0, 30, 400, np.int32), rng.integers(0, 30, (400, 2), np.int32)
    whole, parts = ItemGraph(width=4), ItemGraph(width=4)
    whole.join(items, before)
    for start in range(0, 400, 7):
        parts.join(items[start : start + 7], before[start : start + 7])
    assert np.array_equal(whole.near, parts.near)
    assert np.array_equal(whole.count, parts.count)


def test_an_evicted_item_is_nobodys_neighbour() -> None:
    graph = ItemGraph(width=3)
    graph.join(rows(1, 3), rows(2, 2).reshape(2, 1))
    graph.forget(rows(2))
    assert not graph.near.any()
    assert graph.count[:4].tolist() == [0, 1, 0, 1]
    graph.join(rows(1), rows(4).reshape(1, 1))
    assert graph.near[1].tolist() == [0, 4, 0]


def test_rings_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="3 places, these 4"):
        ItemGraph(width=4).load(ItemGraph(width=3).state(10))


def test_an_items_vector_is_itself_and_its_neighbours_weighted_by_their_degrees() -> None:
    learner = OnlineLearner(small_config(family="gnn"), torch.device("cpu"))
    learner.observe(clustered(640))
    model = learner.family
    assert isinstance(model, NeighbourAggregation)
    own, share = model.item_tables["items"].weight, float(model.dense["share"])
    row = int(learner.items.lookup(["i5"])[0])
    near = model.graph.near[row][model.graph.near[row] > 0]
    weights = (1.0 + model.graph.count[near]) ** -0.5
    around = own[row] + share * (own[near] * torch.from_numpy(weights / weights.sum()).float().unsqueeze(1)).sum(0)
    assert len(near) == NEIGHBOURS
    np.testing.assert_allclose(model.item_vectors(slice(row, row + 1))[0, :-1], around.detach(), atol=1e-5)


def test_the_graph_moves_when_a_mini_batch_has_been_learned() -> None:
    learner = OnlineLearner(small_config(family="gnn"), torch.device("cpu"))
    learner.observe(batch(["a"] * 15, ["x", "y", "z"] * 5))
    model = learner.family
    assert isinstance(model, NeighbourAggregation)
    x, y, z = learner.items.lookup(["x", "y", "z"]).tolist()
    assert not model.graph.near.any()
    learner.observe(batch(["a"], ["x"]))  # the sixteenth fills it
    assert set(model.graph.near[x].tolist()) == {0, y, z}


def test_the_neighbours_of_an_evicted_item_forget_it() -> None:
    """Through all of a life with too many items: no ring names a row that nobody has."""
    learner = OnlineLearner(small_config(family="gnn", item_capacity=40), torch.device("cpu"))
    events = clustered(1200, items=160)
    for start in range(0, len(events), 50):
        learner.observe(events.part(start, start + 50))
        model = learner.family
        assert isinstance(model, NeighbourAggregation)
        free = [row for row in range(1, learner.items.rows) if learner.items.ids[row] is None]
        assert not np.isin(model.graph.near, free).any()
        np.testing.assert_array_equal(model._near[: learner.items.rows], model.graph.near[: learner.items.rows])
