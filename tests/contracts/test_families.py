"""What every model family must do; each test runs once for each of them."""

import io

import numpy as np
import pytest
import torch

from model.batch import EventBatch, TrainingBatch
from model.families import FAMILIES
from model.learner import OnlineLearner
from model.recommender import Leaves, Recommender
from tests.streams import batch, clustered, differences, small_config

CPU = torch.device("cpu")


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def learned(events: EventBatch, cuts: list[int], **changes: object) -> OnlineLearner:
    """A learner that took `events` in parts of the sizes `cuts`, over and over."""
    learner = OnlineLearner(small_config(**changes), CPU)
    start, n = 0, 0
    while start < len(events):
        learner.observe(events.part(start, start + cuts[n % len(cuts)]))
        start, n = start + cuts[n % len(cuts)], n + 1
    return learner


def vectors(learner: OnlineLearner, *users: str) -> np.ndarray:
    """The family's own part of what is published of `users`."""
    rows = learner.users.lookup(users)
    history = learner.log.newest(rows, learner.config.history)
    return learner.family.user_vectors(torch.from_numpy(rows), torch.from_numpy(history)).numpy()


def test_the_grouping_of_events_does_not_change_a_bit(family: str) -> None:
    events = clustered(900)
    one_by_one = learned(events, [1], family=family).state()
    for cuts in ([900], [7, 64, 1], [16]):
        assert differences(one_by_one, learned(events, cuts, family=family).state()) == []


def test_the_grouping_of_events_does_not_change_a_bit_while_ids_are_evicted(family: str) -> None:
    events = clustered(900, users=120, items=100)
    small = {"family": family, "user_capacity": 40, "item_capacity": 33}
    one_by_one = learned(events, [1], **small).state()
    for cuts in ([900], [7, 64, 1]):
        assert differences(one_by_one, learned(events, cuts, **small).state()) == []


def test_a_saved_learner_goes_on_as_if_nothing_had_happened(family: str) -> None:
    events = clustered(900, users=120, items=100)
    changes = {"family": family, "user_capacity": 40, "item_capacity": 33}
    whole = learned(events, [50], **changes)
    first = learned(events.part(0, 437), [50], **changes)
    file = io.BytesIO()
    torch.save(first.state(), file)
    file.seek(0)
    second = OnlineLearner(small_config(**changes), CPU)
    second.load(torch.load(file, weights_only=True))
    second.observe(events.part(437, 900))
    assert differences(whole.state(), second.state()) == []


def test_all_items_are_ranked_by_the_score_that_is_learned(family: str) -> None:
    learner = learned(clustered(600), [50], family=family)
    rows = torch.from_numpy(learner.users.lookup(["u1", "u2", "u3", "nobody"]))
    history = torch.from_numpy(learner.log.newest(rows.numpy(), learner.config.history))
    model, items = learner.family, torch.arange(learner.items.rows)
    tables = model.tables()
    with torch.no_grad():
        users = model.represent(tables, rows, history, history > 0)
        pairs = [model.score_pairs(tables, users, items[i].expand(4)) for i in items]
        np.testing.assert_allclose(model.score(tables, users, items), torch.stack(pairs, dim=1), atol=1e-5)
    np.testing.assert_allclose(model.full_scores(rows, history, len(items)), torch.stack(pairs, dim=1), atol=1e-5)


def test_a_click_changes_the_vector_of_its_user_at_once(family: str) -> None:
    """Before anything is learned from it, and to what that history gives anybody who has it."""
    learner = learned(clustered(320), [50], family=family)
    before, steps = vectors(learner, "u1", "u2"), learner.steps
    learner.observe(batch(["u1"], ["i7"]))
    after = vectors(learner, "u1", "u2")
    np.testing.assert_array_equal(before[1], after[1])
    if learner.family.from_history:
        assert np.abs(after[0] - before[0]).max() > 1e-3
        newest = learner.item_ids(learner.log.newest(learner.users.lookup(["u1"]), learner.config.history)[0])
        learner.observe(batch(["twin"] * len(newest), newest[::-1]))
        np.testing.assert_allclose(vectors(learner, "twin")[0], after[0], atol=1e-6)
    assert learner.steps == steps


def test_the_dot_product_of_what_is_published_is_the_score(family: str) -> None:
    """Or, for a family whose score is none, comes close enough to rank by."""
    learner = learned(clustered(600), [50], family=family)
    rows = learner.users.lookup(["u1", "u2", "u3"])
    model, items = learner.family, slice(0, learner.items.rows)
    tables = model.tables()
    history = torch.from_numpy(learner.log.newest(rows, learner.config.history))
    published = (model.user_vectors(torch.from_numpy(rows), history) @ model.item_vectors(items).T).numpy()
    with torch.no_grad():
        users = model.represent(tables, torch.from_numpy(rows), history, history > 0)
        own = model.score(tables, users, torch.arange(learner.items.rows)).numpy()
    assert published.shape == (3, learner.items.rows)
    if model.exact:
        np.testing.assert_allclose(published, own, atol=1e-5)
    else:  # terms of the user alone, which rank nothing, may be left out
        for ours, full in zip(published[:, 1:], own[:, 1:], strict=True):
            assert np.corrcoef(ours, full)[0, 1] > 0.99


def test_prediction_changes_nothing(family: str) -> None:
    learner = learned(clustered(300), [50], family=family)
    before = learner.state()
    learner.users.lookup(["u1", "nobody"])
    learner.user_vectors(learner.users.lookup(["u1", "nobody"]))
    learner.item_vectors()
    assert differences(before, learner.state()) == []


def test_planted_clusters_are_found(family: str) -> None:
    """Recall@10 well above chance and popularity: 20 of 80 items are a user's own, nearly all of them seen once."""
    learner = learned(clustered(6000), [64], family=family, history=20, seen_items=20, replay=1)
    report = learner.metrics.report()
    assert report["recall_at_10_last_half"] > 1.5 * report["popularity_recall_at_10_last_half"]


def test_a_row_that_is_handed_out_again_is_as_good_as_new(family: str) -> None:
    """M3: 1,000 ids through a table of 100; what the new owner gets holds nothing of the old one."""
    learner = OnlineLearner(small_config(family=family, user_capacity=100, item_capacity=100), CPU)
    for start in range(0, 1000, 50):
        ids = range(start, start + 50)
        observed = learner.observe(batch([f"u{i}" for i in ids], [f"i{i}" for i in ids]))
        for rows, gone in [evicted for part in observed for evicted in part.evicted_users]:
            assert all(learner.log.count[row] == 0 for row in rows if learner.users.ids[row] is None)
            assert not set(gone) & {learner.users.ids[row] for row in rows}
    assert len(learner.users) <= 100
    live = learner.users.lookup([f"u{i}" for i in range(900, 1000)])
    assert (learner.log.count[live[live > 0]] == 1).all()  # one click each, none of a former owner
    for table in (learner.family.user_tables | learner.family.item_tables).values():
        assert torch.isfinite(table.weight).all()
    freed = [row for row in range(1, learner.items.rows) if learner.items.ids[row] is None]
    for table in learner.family.item_tables.values():
        assert (table.squares[freed] == 0).all()


def short_of_memory(family: str, largest: int) -> type[Recommender]:
    """The family on a device that holds `largest` samples at once."""

    class ShortOfMemory(FAMILIES[family]):  # type: ignore[misc]
        def losses(self, tables: Leaves, batch: TrainingBatch) -> torch.Tensor:
            if len(batch) > largest:
                raise torch.OutOfMemoryError("this device is full")
            return super().losses(tables, batch)

    return ShortOfMemory


def test_running_out_of_memory_makes_smaller_micro_batches_with_the_same_gradient(family: str) -> None:
    plain, short = (OnlineLearner(small_config(family=family), CPU) for _ in range(2))
    short.family = short_of_memory(family, 7)(short.config, CPU)
    for learner in (plain, short):
        learner.observe(clustered(320))
    assert short.figures.out_of_memory > 0
    assert short.micro_batch_size <= 7
    assert short.steps == plain.steps == 20
    for name, table in plain.family.item_tables.items():
        np.testing.assert_allclose(table.weight, short.family.item_tables[name].weight, atol=1e-4)


def test_a_step_that_is_not_finite_changes_nothing(family: str) -> None:
    """M5: the step is skipped and counted, and the next ones are learned."""
    learner = learned(clustered(160), [16], family=family)
    known = learner.users.rows, learner.items.rows
    before = learner.family.state(*known)
    events = clustered(16, seed=1)
    learner.observe(batch(events.users, events.items, weights=[np.inf] * 16))
    assert differences(before, learner.family.state(*known)) == []
    assert float(learner.figures.skipped) == 1
    learner.observe(clustered(16, seed=2))
    assert differences(before, learner.family.state(*known)) != []
    assert all(torch.isfinite(t.weight).all() for t in learner.family.item_tables.values())


def test_a_forgotten_user_leaves_nothing_behind(family: str) -> None:
    """Neither in the tables, the log, the replay buffer nor the mini-batch that is still filling."""
    events = clustered(200)
    learner = learned(events, [50], family=family, replay_mean_age=64)
    assert learner.pending == 200 % 16
    row = learner.users.lookup(["u1"])
    changes = learner.forget("u1")
    assert [ids for _, ids in changes.evicted_users] == [["u1"]]
    assert learner.users.lookup(["u1"]) == [0]
    state = learner.state()
    assert int(row[0]) not in state["replay"]["users"].tolist()
    assert int(row[0]) not in state["pending"]["users"].tolist()
    assert learner.log.newest(row, 5).sum() == 0
    for table in learner.family.user_tables.values():
        assert table.squares[row] == 0
    learner.observe(clustered(200, seed=1))  # goes on, and the row may be somebody else's
    assert learner.forget("nobody").evicted_users == []


def test_events_of_negative_weight_push_their_item_down(family: str) -> None:
    learner = learned(clustered(800), [50], family=family)
    user, item = learner.users.lookup(["u1"]), int(learner.items.lookup(["i5"])[0])
    before = (learner.user_vectors(user) @ learner.item_vectors().T)[0, item]
    unwanted = batch(["u1"] * 160, ["i5"] * 160, weights=[-1.0] * 160)
    learner.observe(EventBatch(unwanted.users, unwanted.items, np.zeros(160, np.bool_), unwanted.weights))
    after = (learner.user_vectors(user) @ learner.item_vectors().T)[0, item]
    assert after < before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_same_stream_on_a_gpu_is_as_good(family: str) -> None:
    events = clustered(3000)
    recalls = []
    for device in (CPU, torch.device("cuda")):
        learner = OnlineLearner(small_config(family=family), device)
        learner.observe(events)
        recalls.append(learner.metrics.report()["recall_at_10_last_half"])
    assert recalls[1] == pytest.approx(recalls[0], abs=0.05)
