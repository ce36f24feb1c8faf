"""Training in epochs. The validation ratings choose the epoch and the settings; test ratings are not to be had here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import torch

from model.batch import Float32, Int64
from model.ratings.base import Hyperparameters, RatingModel, TrainingSet
from model.ratings.data import Ratings, SideInformation
from model.ratings.errors import rmse

Report = Callable[[str, int, float], None]  # model, epochs done, validation RMSE


@dataclass(frozen=True, slots=True)
class Fitted:
    """What training brought: a model as it was in its best epoch, or several of a kind, whose mean is predicted."""

    models: tuple[RatingModel, ...]
    settings: Hyperparameters
    epochs: int  # trained up to the one that was kept
    validation_rmse: float
    tried: tuple[tuple[Hyperparameters, float], ...] = ()  # each candidate with its validation RMSE

    def predict(self, users: Int64, items: Int64) -> Float32:
        """Predicted ratings (n,) of user rows (n,) for item rows (n,)."""
        mean: Float32 = np.stack([_predict(model, users, items) for model in self.models]).mean(axis=0)
        return mean


def choose(
    kind: type[RatingModel],
    train: Ratings,
    validation: Ratings,
    side: SideInformation,
    *,
    seed: int,
    device: torch.device,
    report: Report = lambda *_: None,
) -> Fitted:
    """Train each of the model's candidates on `train` and keep the one that `validation` finds best."""
    data = TrainingSet(train, side, device)
    runs = [fit(kind, data, validation, settings, seed=seed, report=report) for settings in kind.candidates]
    best = min(runs, key=lambda run: run.validation_rmse)
    tried = tuple((run.settings, run.validation_rmse) for run in runs)
    return replace(best, tried=tried)


def fit(
    kind: type[RatingModel],
    data: TrainingSet,
    validation: Ratings,
    settings: Hyperparameters,
    *,
    seed: int,
    report: Report = lambda *_: None,
) -> Fitted:
    """Train until `validation` has not got better for `patience` epochs; the best epoch's weights are kept.

    The same seed gives the same model on the CPU, and torch's own random state is left as it was.
    """
    with _seeded(seed, data.device):
        return _train(kind(data, settings), validation, report)


def refit(
    fitted: Fitted,
    known: Ratings,
    side: SideInformation,
    *,
    seed: int,
    device: torch.device,
    report: Report = lambda *_: None,
) -> Fitted:
    """Learn anew from all `known` ratings, those that chose included: with the chosen settings, for as many epochs.

    As many models as the settings' `starts` say; the mean of several dot products is one of longer rows.
    """
    data, kind = TrainingSet(known, side, device), type(fitted.models[0])
    models = []
    with _seeded(seed, device):
        for _ in range(fitted.settings.starts):
            run = _Run(kind(data, fitted.settings))
            for epoch in range(1, fitted.epochs + 1):
                run.epoch()
                report(kind.name, epoch, fitted.validation_rmse)
            models.append(run.average.model)
    return replace(fitted, models=tuple(models))


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _train(model: RatingModel, validation: Ratings, report: Report) -> Fitted:
    settings, run = model.settings, _Run(model)
    best, kept, weights = float("inf"), 0, deepcopy(model.state_dict())
    for epoch in range(1, settings.max_epochs + 1):
        run.epoch()
        error = rmse(_predict(run.average.model, validation.users, validation.items), validation.values)
        report(model.name, epoch, error)
        if error < best:
            best, kept, weights = error, epoch, deepcopy(run.average.model.state_dict())
        elif epoch - kept >= settings.patience:
            break
    model.load_state_dict(weights)
    return Fitted((model,), settings, kept, best)


class _Run:
    """A model in training."""

    def __init__(self, model: RatingModel) -> None:
        self.average = _Average(model, model.settings.averaging)
        self._model = model
        self._optimizer = torch.optim.Adam(model.parameters(), model.settings.learning_rate)

    def epoch(self) -> None:
        """Learn every rating of the training set once."""
        self._model.train()
        shuffled = torch.randperm(len(self._model.train_set)).to(self._model.train_set.device)
        for rows in torch.split(shuffled, self._model.settings.batch_size):
            self._optimizer.zero_grad()
            self._model.loss(rows).backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self.average.update()


class _Average:
    """The running average of a model's weights, which predicts better than the last ones (Polyak & Juditsky 1992)."""

    def __init__(self, model: RatingModel, decay: float) -> None:
        self._latest, self._decay, self._steps = model, decay, 0
        self.model = _twin(model) if decay else model

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after one more step."""
        self._steps += 1
        decay = min(self._decay, self._steps / (self._steps + 10))  # the first, random weights are soon forgotten
        if self.model is not self._latest:
            for ours, theirs in zip(self.model.parameters(), self._latest.parameters(), strict=True):
                ours.lerp_(theirs, 1 - decay)


def _twin(model: RatingModel) -> RatingModel:
    shared = {id(model.train_set): model.train_set}  # the data is not copied
    twin: RatingModel = deepcopy(model, shared)
    return twin


def _predict(model: RatingModel, users: Int64, items: Int64) -> Float32:
    device = model.train_set.device
    predicted = model.predict(torch.from_numpy(users).to(device), torch.from_numpy(items).to(device))
    return predicted.cpu().numpy().astype(np.float32)
