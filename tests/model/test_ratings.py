"""Rating models: a planted matrix is recovered, errors are the textbook's, and nothing of the test reaches a choice."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from model.ratings import MODELS
from model.ratings.base import Hyperparameters, TrainingSet
from model.ratings.data import Ratings, SideInformation, Split, fold_split, random_folds, random_split
from model.ratings.errors import mae, rmse
from model.ratings.training import Fitted, choose, fit, refit

CPU = torch.device("cpu")
NOISE = 0.5
SMALL = {
    "biases": Hyperparameters(learning_rate=0.05, bias_l2=0.1),
    "mf": Hyperparameters(dim=8, learning_rate=0.02, l2=0.02),
    "mlp": Hyperparameters(dim=8, learning_rate=0.01, l2=0.001, averaging=0.95),
    "mlp_side": Hyperparameters(dim=8, learning_rate=0.01, l2=0.001, averaging=0.95),
    "gnn": Hyperparameters(dim=16, learning_rate=0.02, averaging=0.9),
    "gnn_side": Hyperparameters(dim=16, learning_rate=0.02, averaging=0.9),
}


class Planted:
    """200 users × 150 items: 3 + p · q in two dimensions, 40% of it rated, with noise and in half stars from 1 to 5."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        users, items = rng.normal(0, 1, (200, 2)), rng.normal(0, 1, (150, 2))
        truth = np.clip(3 + users @ items.T, 1, 5)
        rows, columns = np.nonzero(rng.random(truth.shape) < 0.4)
        self.truth = truth[rows, columns].astype(np.float32)
        given = np.clip(np.round(2 * (self.truth + rng.normal(0, NOISE, len(rows)))) / 2, 1, 5)
        self.ratings = Ratings(rows, columns, given.astype(np.float32))
        self.side = SideInformation(np.eye(4, dtype=np.float32)[rng.integers(0, 4, 200)], np.ones((150, 1), np.float32))
        self.split = random_split(len(rows), seed)

    def fitted(self, model: str, settings: Hyperparameters | None = None, seed: int = 0) -> Fitted:
        train, validation = self.ratings.part(self.split.train), self.ratings.part(self.split.validation)
        data = TrainingSet(train, self.side, CPU)
        return fit(MODELS[model], data, validation, settings or SMALL[model], seed=seed)

    def predicted(self, fitted: Fitted) -> np.ndarray:
        test = self.ratings.part(self.split.test)
        return fitted.predict(test.users, test.items)


@pytest.fixture(scope="module")
def planted() -> Planted:
    return Planted()


@pytest.mark.parametrize("model", [name for name in MODELS if name != "biases"])
def test_a_planted_matrix_is_recovered_to_less_than_its_noise(planted: Planted, model: str) -> None:
    truth = planted.truth[planted.split.test]
    assert rmse(planted.predicted(planted.fitted(model)), truth) < NOISE


def test_biases_cannot_recover_what_is_no_sum_of_biases(planted: Planted) -> None:
    truth = planted.truth[planted.split.test]
    assert rmse(planted.predicted(planted.fitted("biases")), truth) > 1.5 * NOISE


def test_biases_are_recovered() -> None:
    rng = np.random.default_rng(0)
    users, items = rng.normal(0, 1, 100), rng.normal(0, 1, 80)
    rows, columns = np.nonzero(rng.random((100, 80)) < 0.5)
    ratings = Ratings(rows, columns, (3 + users[rows] + items[columns]).astype(np.float32))
    split = random_split(len(rows), 0)
    data = TrainingSet(ratings.part(split.train), SideInformation.none(100, 80), CPU)
    settings = replace(SMALL["biases"], bias_l2=0.0)
    fitted = fit(MODELS["biases"], data, ratings.part(split.validation), settings, seed=0)
    test = ratings.part(split.test)
    assert rmse(fitted.predict(test.users, test.items), test.values) < 0.15  # the extremes are clamped


def test_side_information_helps_where_it_is_the_answer() -> None:
    rng = np.random.default_rng(1)
    taste, kind = rng.integers(0, 2, 150), rng.integers(0, 2, 400)
    users, items = rng.integers(0, 150, 3000), rng.integers(0, 400, 3000)  # 7 ratings an item: its rows say little
    values = np.where(taste[users] == kind[items], 4.0, 2.0) + rng.normal(0, 0.3, 3000)
    ratings = Ratings(users, items, values.astype(np.float32))
    side = SideInformation(np.eye(2, dtype=np.float32)[taste], np.eye(2, dtype=np.float32)[kind])
    split = random_split(3000, 0)
    test = ratings.part(split.test)
    errors = {}
    for model in ("mlp", "mlp_side"):
        data = TrainingSet(ratings.part(split.train), side, CPU)
        fitted = fit(MODELS[model], data, ratings.part(split.validation), SMALL[model], seed=0)
        errors[model] = rmse(fitted.predict(test.users, test.items), test.values)
    assert errors["mlp_side"] < 0.4 < errors["mlp"]


@pytest.mark.parametrize("model", list(MODELS))
def test_the_same_seed_gives_the_same_model_and_leaves_the_random_state_alone(planted: Planted, model: str) -> None:
    settings = replace(SMALL[model], max_epochs=2)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, same = planted.fitted(model, settings), planted.fitted(model, settings)
    assert torch.equal(torch.rand(3), expected)
    np.testing.assert_array_equal(planted.predicted(one), planted.predicted(same))
    assert one.validation_rmse == same.validation_rmse
    if model != "biases":
        other = planted.fitted(model, settings, seed=1)
        assert (planted.predicted(one) != planted.predicted(other)).any()


@pytest.mark.parametrize("model", list(MODELS))
def test_test_ratings_change_neither_epoch_nor_settings_nor_predictions(
    planted: Planted, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(SMALL[model], max_epochs=2)
    monkeypatch.setattr(MODELS[model], "candidates", (short, replace(short, learning_rate=1e-4)))
    poisoned = planted.ratings.values.copy()
    poisoned[planted.split.test] = 1e6
    fitted = [
        _chosen(model, ratings, planted) for ratings in (planted.ratings, replace(planted.ratings, values=poisoned))
    ]
    clean, after = fitted
    assert (clean.epochs, clean.settings, clean.tried) == (after.epochs, after.settings, after.tried)
    np.testing.assert_array_equal(planted.predicted(clean), planted.predicted(after))


def test_learning_anew_from_all_known_ratings_keeps_what_was_chosen_and_uses_them(planted: Planted) -> None:
    fitted = planted.fitted("mf", replace(SMALL["mf"], starts=2))
    known = planted.ratings.part(np.concatenate([planted.split.train, planted.split.validation]))
    epochs: list[int] = []
    again = refit(fitted, known, planted.side, seed=0, device=CPU, report=lambda _m, epoch, _e: epochs.append(epoch))
    assert epochs == 2 * list(range(1, fitted.epochs + 1))
    validation = planted.ratings.part(planted.split.validation)
    assert (len(fitted.models), len(again.models)) == (1, 2)
    alone = [replace(again, models=(model,)).predict(validation.users, validation.items) for model in again.models]
    assert (alone[0] != alone[1]).any()
    mean = again.predict(validation.users, validation.items)
    np.testing.assert_allclose(mean, (alone[0] + alone[1]) / 2, rtol=1e-5)
    assert (again.settings, again.epochs) == (fitted.settings, fitted.epochs)
    seen = rmse(again.predict(validation.users, validation.items), validation.values)
    assert seen < fitted.validation_rmse - 0.1  # they were learned from
    assert rmse(planted.predicted(again), planted.truth[planted.split.test]) < NOISE


def _chosen(model: str, ratings: Ratings, planted: Planted) -> Fitted:
    train, validation = ratings.part(planted.split.train), ratings.part(planted.split.validation)
    return choose(MODELS[model], train, validation, planted.side, seed=0, device=CPU)


def test_validation_ratings_choose_between_candidates(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    good = replace(SMALL["mf"], max_epochs=15)
    monkeypatch.setattr(MODELS["mf"], "candidates", (replace(good, l2=10.0), good))
    fitted = _chosen("mf", planted.ratings, planted)
    assert fitted.settings == good
    assert [error == fitted.validation_rmse for _, error in fitted.tried] == [False, True]


def test_the_best_epoch_is_kept_not_the_last(planted: Planted) -> None:
    overfitting = replace(SMALL["mf"], l2=0.0, learning_rate=0.05, patience=5)
    errors: list[float] = []
    train, validation = planted.ratings.part(planted.split.train), planted.ratings.part(planted.split.validation)
    data = TrainingSet(train, planted.side, CPU)
    fitted = fit(MODELS["mf"], data, validation, overfitting, seed=0, report=lambda _m, _e, error: errors.append(error))
    assert fitted.epochs == 1 + int(np.argmin(errors)) == len(errors) - 5
    kept = rmse(fitted.predict(validation.users, validation.items), validation.values)
    assert kept == fitted.validation_rmse == min(errors)


def test_a_rating_sends_no_message_while_it_is_learned(planted: Planted) -> None:
    train = planted.ratings.part(planted.split.train)
    rows = torch.arange(100)
    changed = replace(train, values=train.values.copy())
    changed.values[:100] = train.values[:100][::-1]
    logits = []
    for ratings in (train, changed):
        torch.manual_seed(0)
        model = MODELS["gnn"](TrainingSet(ratings, planted.side, CPU), SMALL["gnn"]).eval()
        others = torch.ones(len(ratings))
        others[rows] = 0
        data = model.train_set
        logits.append(model._logits(data.users[rows], data.items[rows], others))  # type: ignore[operator]
    torch.testing.assert_close(logits[0], logits[1])


def test_messages_are_the_sums_of_the_textbook(planted: Planted) -> None:
    model = MODELS["gnn"](TrainingSet(planted.ratings, planted.side, CPU), SMALL["gnn"])
    rows = model.item_rows.detach().double().requires_grad_()  # type: ignore[union-attr]
    weights = torch.rand(len(planted.ratings), dtype=torch.float64)
    data, levels = model.train_set, model.level_of
    scattered = torch.zeros(200, 16, dtype=torch.float64).index_add(
        0, data.users, weights[:, None] * rows[levels, data.items]
    )
    wanted = torch.autograd.grad(scattered.square().sum(), rows)[0]
    sums = model.to_users.sums(weights, rows)  # type: ignore[union-attr]
    torch.testing.assert_close(sums, scattered)
    torch.testing.assert_close(torch.autograd.grad(sums.square().sum(), rows)[0], wanted)


def test_errors_are_those_of_numpy() -> None:
    rng = np.random.default_rng(0)
    predicted, actual = rng.normal(3, 1, 500).astype(np.float32), rng.integers(1, 6, 500).astype(np.float32)
    difference = predicted.astype(np.float64) - actual
    assert rmse(predicted, actual) == pytest.approx(np.linalg.norm(difference) / np.sqrt(500), rel=1e-12)
    assert mae(predicted, actual) == pytest.approx(np.abs(difference).mean(), rel=1e-12)
    assert (rmse(actual, actual), mae(actual, actual)) == (0.0, 0.0)
    assert rmse(np.array([1, 5], np.float32), np.array([4, 1], np.float32)) == pytest.approx(3.5355339)


def test_predictions_stay_within_the_ratings_learned_from(planted: Planted) -> None:
    fitted = planted.fitted("mf", replace(SMALL["mf"], max_epochs=3))
    learned = planted.ratings.values[planted.split.train]
    everything = fitted.predict(planted.ratings.users, planted.ratings.items)
    assert learned.min() <= everything.min()
    assert everything.max() <= learned.max()


def whole(split: Split) -> list[int]:
    return sorted(np.concatenate([split.train, split.validation, split.test]).tolist())


def test_a_random_split_is_72_8_20_without_overlap_and_another_with_another_seed() -> None:
    split = random_split(100_000, 3)
    assert (len(split.train), len(split.validation), len(split.test)) == (72_000, 8_000, 20_000)
    assert whole(split) == list(range(100_000))
    assert np.array_equal(random_split(100_000, 3).test, split.test)
    assert not np.array_equal(random_split(100_000, 4).test, split.test)


def test_folds_test_every_rating_once_and_choose_by_none_of_them() -> None:
    folds = random_folds(1003, seed=1)
    assert sorted(np.concatenate(folds).tolist()) == list(range(1003))
    for test in folds:
        split = fold_split("f", test, 1003, seed=1)
        assert sorted(split.test.tolist()) == sorted(test.tolist())
        assert whole(split) == list(range(1003))
        assert len(split.validation) == round(0.1 * (1003 - len(test)))
