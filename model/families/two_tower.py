"""Two towers: a user is what it clicked last, an item is a row."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.decay import decayed_means
from model.recommender import Leaves, Recommender

DECAYS = (0.5, 0.9, 1.0)  # of a click's weight, by click: the last few, the last dozen, all alike


class TwoTower(Recommender):
    """user = Σ over γ of W_γ · (normalised γ-decayed mean of the last clicks' item rows), plus a learned vector
    for users without history. History and output share one item table. W_γ starts at identity / 3.
    """

    name: ClassVar[str] = "two_tower"

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._mix = nn.Parameter((torch.eye(config.dim).repeat(len(DECAYS), 1) / len(DECAYS)).to(device))  # (3 d, d)
        self._nobody = nn.Parameter(torch.zeros(config.dim, device=device))  # (d,)
        self.dense = nn.ParameterDict({"mix": self._mix, "nobody": self._nobody})
        ages = torch.arange(config.history)
        self._decays = torch.stack([torch.tensor(g) ** ages for g in DECAYS]).to(device)  # (3, L)

    def represent(self, tables: Leaves, users: Tensor, history: Tensor, present: Tensor) -> Tensor:  # noqa: ARG002
        """See the class; (B, d)."""
        means = decayed_means(tables["items"], history, present, self._decays)  # (B, 3 d)
        return means @ self._mix + ~present[:, :1] * self._nobody
