"""Mean, a bias a user and a bias an item: what every other model must beat."""

from typing import ClassVar

from torch import Tensor

from model.ratings.base import Hyperparameters, RatingModel


class Biases(RatingModel):
    """rating = μ + b_u + b_i."""

    name: ClassVar[str] = "biases"
    label: ClassVar[str] = "biases only"
    candidates: ClassVar[tuple[Hyperparameters, ...]] = tuple(
        Hyperparameters(learning_rate=0.02, batch_size=4096, bias_l2=l2) for l2 in (2.0, 5.0)
    )

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """See the class; (n,)."""
        return self.biases(users, items)
