"""Matrix factorisation with biases (Koren, Bell & Volinsky 2009)."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from model.ratings.base import Hyperparameters, RatingModel, TrainingSet


class BiasedFactorisation(RatingModel):
    """rating = μ + b_u + b_i + p_u · q_i."""

    name: ClassVar[str] = "mf"
    label: ClassVar[str] = "MF with biases"
    candidates: ClassVar[tuple[Hyperparameters, ...]] = tuple(
        Hyperparameters(dim=64, learning_rate=0.02, batch_size=2048, l2=l2, starts=4, patience=5) for l2 in (0.11, 0.13)
    )

    def __init__(self, train: TrainingSet, settings: Hyperparameters) -> None:
        super().__init__(train, settings)
        spread = settings.dim**-0.5  # products begin at about 1 however wide the rows are
        self.user_rows = nn.Parameter(torch.randn(train.n_users, settings.dim, device=train.device) * spread)
        self.item_rows = nn.Parameter(torch.randn(train.n_items, settings.dim, device=train.device) * spread)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """See the class; (n,)."""
        return self.biases(users, items) + (self.user_rows[users] * self.item_rows[items]).sum(1)

    def penalty(self, users: Tensor, items: Tensor) -> Tensor:
        """Of rows and biases; ()."""
        squares = self.user_rows[users].square().sum(1) + self.item_rows[items].square().sum(1)
        return super().penalty(users, items) + self.settings.l2 * squares.mean()
