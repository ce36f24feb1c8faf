"""What every rating model is: a loss on some of the ratings it learns from, and a prediction for any pair."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from model.ratings.data import Ratings, SideInformation


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Settings of one training run; a model says which of them it reads."""

    dim: int = 64
    learning_rate: float = 5e-3  # Adam
    batch_size: int = 1024  # ratings in one optimizer step
    l2: float = 0.0  # of embeddings, for each rating of theirs
    bias_l2: float = 2.0  # of biases, once each: as if so many more ratings had said that there is none
    dropout: float = 0.0
    averaging: float = 0.0  # decay, a step, of the average of the weights that predicts; 0 = the last weights do
    starts: int = 1  # models from different first weights whose predictions are averaged in the end
    max_epochs: int = 100
    patience: int = 8  # epochs without a better validation RMSE before training stops


class TrainingSet:
    """The ratings that a model may learn from, and what is known of users and items, on the device."""

    def __init__(self, ratings: Ratings, side: SideInformation, device: torch.device) -> None:
        self.device = device
        self.users = torch.from_numpy(ratings.users).to(device)  # (n,)
        self.items = torch.from_numpy(ratings.items).to(device)  # (n,)
        self.values = torch.from_numpy(ratings.values).to(device)  # (n,)
        self.user_side = torch.from_numpy(side.users).to(device)  # (U, F_users)
        self.item_side = torch.from_numpy(side.items).to(device)  # (I, F_items)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def n_users(self) -> int:
        return len(self.user_side)

    @property
    def n_items(self) -> int:
        return len(self.item_side)


class RatingModel(nn.Module, ABC):
    """Made for one training set. What it knows of ratings is that set: no other ever reaches it."""

    name: ClassVar[str]
    label: ClassVar[str]  # in tables
    uses_side: ClassVar[bool] = False
    candidates: ClassVar[tuple[Hyperparameters, ...]]  # the validation ratings choose between these

    def __init__(self, train: TrainingSet, settings: Hyperparameters) -> None:
        super().__init__()
        self.train_set, self.settings = train, settings
        self.mean = train.values.mean()
        self.lowest, self.highest = train.values.min(), train.values.max()
        self.user_ratings = torch.bincount(train.users, minlength=train.n_users).clamp(min=1)  # (U,)
        self.item_ratings = torch.bincount(train.items, minlength=train.n_items).clamp(min=1)  # (I,)
        self.user_bias = nn.Parameter(torch.zeros(train.n_users, device=train.device))
        self.item_bias = nn.Parameter(torch.zeros(train.n_items, device=train.device))

    @abstractmethod
    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Predicted ratings (n,) of user rows (n,) for item rows (n,)."""

    def penalty(self, users: Tensor, items: Tensor) -> Tensor:
        """Regularisation () for ratings of these users (n,) and items (n,)."""
        squares = self.user_bias[users].square() / self.user_ratings[users]
        squares = squares + self.item_bias[items].square() / self.item_ratings[items]
        penalty: Tensor = self.settings.bias_l2 * squares.mean()
        return penalty

    def loss(self, rows: Tensor) -> Tensor:
        """Loss () on the ratings `rows` (n,) of the training set."""
        users, items = self.train_set.users[rows], self.train_set.items[rows]
        errors: Tensor = self(users, items) - self.train_set.values[rows]
        return errors.square().mean() + self.penalty(users, items)

    @torch.no_grad()
    def predict(self, users: Tensor, items: Tensor) -> Tensor:
        """As `forward`, within the range of the ratings learned from, and without dropout."""
        self.eval()
        predicted: Tensor = self(users, items)
        return predicted.clamp(self.lowest, self.highest)

    def biases(self, users: Tensor, items: Tensor) -> Tensor:
        """Mean plus biases (n,)."""
        biased: Tensor = self.mean + self.user_bias[users] + self.item_bias[items]
        return biased
