"""Matrix factorisation: a user is a row, an item is a row."""

from typing import ClassVar

import torch
from torch import Tensor

from model.config import ModelConfig
from model.recommender import Leaves, Recommender


class MatrixFactorisation(Recommender):
    """The plain model: it must learn each user by gradient, so a new one gets the popular items at first."""

    name: ClassVar[str] = "mf"
    from_history: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.user_tables["users"] = self._table("users", config.dim, config.init_std)

    def represent(self, tables: Leaves, users: Tensor, history: Tensor, present: Tensor) -> Tensor:  # noqa: ARG002
        """The users' own rows; (B, d)."""
        return tables["users"][users]
