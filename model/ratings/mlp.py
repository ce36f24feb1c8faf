"""A multilayer perceptron on concatenated embeddings (He et al. 2017), without and with side information."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from model.ratings.base import Hyperparameters, RatingModel, TrainingSet


class Perceptron(RatingModel):
    """rating = μ + b_u + b_i + MLP([p_u, q_i])."""

    name: ClassVar[str] = "mlp"
    label: ClassVar[str] = "MLP on embeddings"
    candidates: ClassVar[tuple[Hyperparameters, ...]] = tuple(
        Hyperparameters(learning_rate=5e-3, l2=l2, bias_l2=4.0, dropout=0.6, averaging=0.99, starts=2, patience=5)
        for l2 in (0.01, 0.02)
    )

    def __init__(self, train: TrainingSet, settings: Hyperparameters) -> None:
        super().__init__(train, settings)
        dim, device = settings.dim, train.device
        self.user_rows = nn.Parameter(torch.randn(train.n_users, dim, device=device) * 0.1)
        self.item_rows = nn.Parameter(torch.randn(train.n_items, dim, device=device) * 0.1)
        self.layers = nn.Sequential(
            nn.Linear(2 * dim + self._side_width(), 2 * dim), nn.ReLU(), nn.Dropout(settings.dropout),
            nn.Linear(2 * dim, dim), nn.ReLU(), nn.Dropout(settings.dropout),
            nn.Linear(dim, 1),
        ).to(device)  # fmt: skip

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """See the class; (n,)."""
        inputs = torch.cat([self.user_rows[users], self.item_rows[items], *self._side(users, items)], dim=1)
        corrections: Tensor = self.layers(inputs)
        return self.biases(users, items) + corrections.squeeze(1)

    def penalty(self, users: Tensor, items: Tensor) -> Tensor:
        """Of embeddings and biases; ()."""
        squares = self.user_rows[users].square().sum(1) + self.item_rows[items].square().sum(1)
        return super().penalty(users, items) + self.settings.l2 * squares.mean()

    def _side_width(self) -> int:
        return 0

    def _side(self, users: Tensor, items: Tensor) -> list[Tensor]:  # noqa: ARG002
        return []


class PerceptronWithSide(Perceptron):
    """The same with what is known of the user and the item beside their embeddings."""

    name: ClassVar[str] = "mlp_side"
    label: ClassVar[str] = "MLP with side information"
    uses_side: ClassVar[bool] = True

    def _side_width(self) -> int:
        return self.train_set.user_side.shape[1] + self.train_set.item_side.shape[1]

    def _side(self, users: Tensor, items: Tensor) -> list[Tensor]:
        return [self.train_set.user_side[users], self.train_set.item_side[items]]
