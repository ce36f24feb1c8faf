"""Training in epochs. The validation ratings choose the epoch and the settings; test ratings are not to be had here."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch

from model.batch import Float32, Int64
from model.ratings.base import Hyperparameters, RatingModel, TrainingSet
from model.ratings.data import Ratings, SideInformation
from model.ratings.errors import rmse

Report = Callable[[str, int, float], None]  # model, epochs done, validation RMSE


@dataclass(frozen=True, slots=True)
class Fitted:
    """A model after training, as it was in its best epoch."""

    model: RatingModel
    settings: Hyperparameters
    epochs: int  # trained up to the one that was kept
    validation_rmse: float
    tried: tuple[tuple[Hyperparameters, float], ...] = ()  # each candidate with its validation RMSE

    def predict(self, users: Int64, items: Int64) -> Float32:
        """Predicted ratings (n,) of user rows (n,) for item rows (n,)."""
        return _predict(self.model, users, items)


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
    return Fitted(best.model, best.settings, best.epochs, best.validation_rmse, tried)


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
    devices = [data.device] if data.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        model = kind(data, settings)
        return _train(model, validation, report)


def _train(model: RatingModel, validation: Ratings, report: Report) -> Fitted:
    settings = model.settings
    optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate)
    average = _Average(model, settings.averaging)
    best, kept, weights = float("inf"), 0, deepcopy(model.state_dict())
    for epoch in range(1, settings.max_epochs + 1):
        _run_epoch(model, optimizer, average)
        error = rmse(average.predict(validation.users, validation.items), validation.values)
        report(model.name, epoch, error)
        if error < best:
            best, kept, weights = error, epoch, deepcopy(average.model.state_dict())
        elif epoch - kept >= settings.patience:
            break
    model.load_state_dict(weights)
    return Fitted(model, settings, kept, best)


def _run_epoch(model: RatingModel, optimizer: torch.optim.Optimizer, average: "_Average") -> None:
    model.train()
    shuffled = torch.randperm(len(model.train_set)).to(model.train_set.device)
    for rows in torch.split(shuffled, model.settings.batch_size):
        optimizer.zero_grad()
        model.loss(rows).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        average.update()


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

    def predict(self, users: Int64, items: Int64) -> Float32:
        """Predicted ratings (n,)."""
        return _predict(self.model, users, items)


def _twin(model: RatingModel) -> RatingModel:
    shared = {id(model.train_set): model.train_set}  # the data is not copied
    twin: RatingModel = deepcopy(model, shared)
    return twin


def _predict(model: RatingModel, users: Int64, items: Int64) -> Float32:
    device = model.train_set.device
    predicted = model.predict(torch.from_numpy(users).to(device), torch.from_numpy(items).to(device))
    return predicted.cpu().numpy().astype(np.float32)
