"""A pairwise network: how well a user and an item fit is what a small MLP makes of the two, beside their product."""

from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.decay import decayed_means
from model.recommender import Leaves, Recommender
from model.sampling import generator

DECAYS = (0.5, 0.9, 1.0)  # of a click's weight, by click: the last few, the last dozen, all alike
HIDDEN = 16  # units of the MLP
CURVATURE = 0.25  # half of silu's second derivative at 0; its first one is 1/2
PAIRS_AT_ONCE = 250_000  # of a user and an item when all items are scored: what fits a processor's cache


class PairwiseNetwork(Recommender):
    """NeuMF-like (He et al. 2017), but a user is what it clicked last instead of a row.

    score(u, i) = u · e(i) + bias(i) + w · silu(A m + b + c(i)), where m are γ-decayed means of the last clicks' item
    rows, u = Σ over γ of W_γ · m_γ as in the two-tower, and c(i) is the item's row in a table of its own: the first
    layer of an MLP over (m, item), split by its input, so that a user's half and an item's half are made once each.

    The score is no dot product. What is published is its second-order Taylor expansion around 0, which is one:
    silu(a + c) ≈ (a + c) / 2 + (a + c)² / 4, whose terms of the user alone rank nothing and are left out. Ranking all
    items by the MLP itself costs HIDDEN times what the dot product's sum costs, for each of their pairs.
    """

    name: ClassVar[str] = "mlp"
    exact: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.item_tables["hidden"] = self._table("hidden", HIDDEN, config.init_std)
        rng, means = generator(config.seed, "mlp", 0), len(DECAYS) * config.dim
        up = rng.standard_normal((means, HIDDEN), dtype=np.float32) * np.float32(means**-0.5)
        down = rng.standard_normal(HIDDEN, dtype=np.float32) * np.float32(HIDDEN**-0.5)
        self._mix = nn.Parameter((torch.eye(config.dim).repeat(len(DECAYS), 1) / len(DECAYS)).to(device))  # (3 d, d)
        self._nobody = nn.Parameter(torch.zeros(config.dim, device=device))  # (d,)
        self._up = nn.Parameter(torch.from_numpy(up).to(device))  # (3 d, H)
        self._offset = nn.Parameter(torch.zeros(HIDDEN, device=device))  # (H,)
        self._down = nn.Parameter(torch.from_numpy(down).to(device))  # (H,)
        self.dense = nn.ParameterDict(
            {"mix": self._mix, "nobody": self._nobody, "up": self._up, "offset": self._offset, "down": self._down}
        )
        ages = torch.arange(config.history)
        self._decays = torch.stack([torch.tensor(g) ** ages for g in DECAYS]).to(device)  # (3, L)

    @property
    def dim(self) -> int:
        """Width of the published vectors."""
        return self.config.dim + HIDDEN + 1

    def represent(self, tables: Leaves, users: Tensor, history: Tensor, present: Tensor) -> Tensor:  # noqa: ARG002
        """The user of the product, then its half of the MLP's first layer; (B, d + H)."""
        means = decayed_means(tables["items"], history, present, self._decays)  # (B, 3 d)
        user = means @ self._mix + ~present[:, :1] * self._nobody
        return torch.cat([user, means @ self._up + self._offset], dim=1)

    def score(self, tables: Leaves, users: Tensor, items: Tensor) -> Tensor:
        """Scores (B, n) of item rows `items` (n,) for represented `users` (B, d + H)."""
        product, hidden = users[:, : self.config.dim], users[:, self.config.dim :]
        fit = F.silu(hidden.unsqueeze(1) + tables["hidden"][items]) @ self._down  # (B, n)
        return super().score(tables, product, items) + fit

    def score_pairs(self, tables: Leaves, users: Tensor, items: Tensor) -> Tensor:
        """Scores (B,) of one item row each, `items` (B,), for represented `users` (B, d + H)."""
        product, hidden = users[:, : self.config.dim], users[:, self.config.dim :]
        fit = F.silu(hidden + tables["hidden"][items]) @ self._down
        return super().score_pairs(tables, product, items) + fit

    @torch.no_grad()
    def full_scores(self, users: Tensor, history: Tensor, item_rows: int) -> Tensor:
        """Scores (B, item_rows) of all items by the MLP itself."""
        tables = self.tables()
        represented = self.represent(tables, users, history, history > 0)
        items = torch.arange(item_rows, device=self.device)
        size = max(1, PAIRS_AT_ONCE // item_rows)
        parts = (represented[start : start + size] for start in range(0, len(represented), size))
        return torch.cat([self.score(tables, part, items) for part in parts])

    def user_layout(self, users: Tensor) -> Tensor:
        """What is published (B, dim) of represented `users` (B, d + H)."""
        product, hidden = users[:, : self.config.dim], users[:, self.config.dim :]
        return F.pad(torch.cat([product, 2 * CURVATURE * self._down * hidden], dim=1), (0, 1), value=1.0)

    @torch.no_grad()
    def item_vectors(self, rows: slice | Tensor) -> Tensor:
        """Vectors (n, dim) of item rows."""
        tables = self.tables()
        hidden = tables["hidden"][rows]
        alone = (hidden / 2 + CURVATURE * hidden.square()) @ self._down
        return torch.cat([tables["items"][rows], hidden, tables["bias"][rows] + alone.unsqueeze(1)], dim=1)
