"""What is clicked together, and nothing else: no embeddings, hardly anything to learn by gradient."""

from typing import ClassVar

import torch
from torch import Tensor

from model.config import ModelConfig
from model.recommender import Leaves, Recommender


class CooccurrenceOnly(Recommender):
    """A learned bias for each item. All that knows the user is in the fusion, which joins every family: item-kNN with
    recency, transitions and popularity, by weights learned online. The cheapest family, and one to compare with.
    """

    name: ClassVar[str] = "cooccurrence"
    from_history: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__(config, device)
        del self.item_tables["items"]

    @property
    def dim(self) -> int:
        """Width of the published vectors."""
        return 1

    def represent(self, tables: Leaves, users: Tensor, history: Tensor, present: Tensor) -> Tensor:  # noqa: ARG002
        """Nothing stands for a user: (B, 0)."""
        return tables["bias"].new_empty(len(users), 0)

    def score(self, tables: Leaves, users: Tensor, items: Tensor) -> Tensor:
        """The items' biases, for everybody (B, n)."""
        return tables["bias"][items, 0].expand(len(users), -1)

    def score_pairs(self, tables: Leaves, users: Tensor, items: Tensor) -> Tensor:  # noqa: ARG002
        """The items' biases (B,)."""
        return tables["bias"][items, 0]

    @torch.no_grad()
    def full_scores(self, users: Tensor, history: Tensor, item_rows: int) -> Tensor:  # noqa: ARG002
        """The items' biases, for everybody (B, item_rows)."""
        return self.tables()["bias"][:item_rows, 0].repeat(len(users), 1)

    def user_layout(self, users: Tensor) -> Tensor:
        """1 for everybody (B, 1)."""
        return users.new_ones(len(users), 1)

    @torch.no_grad()
    def item_vectors(self, rows: slice | Tensor) -> Tensor:
        """The biases (n, 1) of item rows."""
        return self.tables()["bias"][rows]
