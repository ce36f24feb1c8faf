"""Embedding rows that grow, with their optimizer state beside them."""

import numpy as np
import torch
from torch import Tensor

from model.batch import Int32
from model.state import State

_SPREADS = 1024


class EmbeddingTable:
    """A matrix (rows, width) learned by row-wise Adagrad: one accumulator a row.

    Row-wise Adagrad: G_r += mean(g_r²); w_r -= lr · g_r / √(G_r + ε), as in FBGEMM's EXACT_ROWWISE_ADAGRAD.
    New rows are drawn from a generator that is keyed by (seed, table, rows before, times reset), so that they do
    not depend on how events were grouped.
    """

    def __init__(
        self, name: str, width: int, init_std: float, learning_rate: float, seed: int, device: torch.device
    ) -> None:
        self.width, self.init_std, self.learning_rate = width, init_std, learning_rate
        self._key = (seed, *name.encode())
        self._resets = 0
        self._spread: Tensor | None = None
        self.weight = torch.zeros(1, width, device=device)  # (rows, width); row 0 stays zero
        self.squares = torch.zeros(1, device=device)  # (rows,)

    def grow(self, rows: int) -> None:
        """Hold at least `rows` rows; the size doubles, so the new rows are the same however it came to that."""
        while len(self.weight) < rows:
            size = max(1024, 2 * len(self.weight))
            new = self._draw(size - len(self.weight), len(self.weight), 0)
            self.weight = torch.cat([self.weight, new])
            self.squares = torch.cat([self.squares, torch.zeros(len(new), device=self.squares.device)])

    def reset(self, rows: Int32) -> None:
        """Make `rows` as good as new: weights and optimizer state."""
        self._resets += 1
        where = torch.from_numpy(rows.astype(np.int64)).to(self.weight.device)
        self.weight[where] = self._draw(len(rows), len(self.weight), self._resets)
        self.squares[where] = 0.0

    def spread(self, rows: Tensor) -> Tensor:
        """What keeps new `rows` (n,) apart that would otherwise be equal: (n, width), the same each time."""
        if self._spread is None:
            self._spread = self._draw(_SPREADS, 0, -1 % 2**32)
        return self._spread[rows % _SPREADS]

    def gather(self, rows: Tensor) -> Tensor:
        """A leaf (n, width) with the weights of `rows` (n,), for the gradient."""
        return self.weight[rows].requires_grad_()

    def apply(self, rows: Tensor, gradient: Tensor, finite: Tensor) -> None:
        """One step on distinct `rows` (n,) with `gradient` (n, width); nothing where `finite` () is false."""
        gradient = torch.where(finite, gradient, 0.0)
        squares = self.squares[rows] + gradient.square().mean(1)
        self.squares[rows] = squares
        self.weight.index_add_(0, rows, gradient * (-self.learning_rate * (squares + 1e-10).rsqrt()).unsqueeze(1))

    def state(self, rows: int) -> State:
        """Tensors and plain data that `load` takes, for the first `rows` rows."""
        return {
            "weight": self.weight[:rows].detach().cpu().clone(),
            "squares": self.squares[:rows].cpu().clone(),
            "resets": self._resets,
            "size": len(self.weight),
        }

    def load(self, state: State) -> None:
        """Become the table whose `state` this is."""
        weight, squares, resets, size = state["weight"], state["squares"], state["resets"], state["size"]
        if weight.shape[1] != self.width:
            raise ValueError(f"saved rows have width {weight.shape[1]}, these {self.width}")
        device = self.weight.device
        self.weight = torch.zeros(1, self.width, device=device)
        self.squares = torch.zeros(1, device=device)
        self.grow(size)  # rows not handed out yet are drawn as they were
        self.weight[: len(weight)] = weight.to(device)
        self.squares[: len(squares)] = squares.to(device)
        self._resets = resets

    def _draw(self, count: int, rows_before: int, resets: int) -> Tensor:
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((*self._key, rows_before, resets))))
        drawn = generator.standard_normal((count, self.width), dtype=np.float32) * np.float32(self.init_std)
        return torch.from_numpy(drawn).to(self.weight.device)
