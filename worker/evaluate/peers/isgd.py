"""Incremental SGD for matrix factorisation (Vinagre et al. 2014), with negatives beside each click."""

from typing import Any

import numpy as np

from model.batch import Float32, Float64, Int32
from model.kernels import kernel


@kernel(fastmath=True)
def _score(user: Float32, items: Float32, scores: Float64) -> None:
    for j in range(scores.shape[0]):
        total = np.float32(0)
        for f in range(user.shape[0]):
            total += user[f] * items[j, f]
        scores[j] = total


@kernel
def _step(user: Float32, item: Float32, target: float, rate: float, decay: float) -> None:
    error = np.float32(target) - np.dot(user, item)
    for f in range(user.shape[0]):
        before = user[f]
        user[f] += rate * (error * item[f] - decay * before)
        item[f] += rate * (error * before - decay * item[f])


@kernel
def _learn(
    user: Float32, items: Float32, item: int, negatives: Int32, clicked: Int32, rate: float, decay: float
) -> None:
    for n in range(negatives.shape[0]):
        negative = negatives[n]
        if negative != item and not np.any(clicked == negative):
            _step(user, items[negative], 0.0, rate, decay)
    _step(user, items[item], 1.0, rate, decay)


class Isgd:
    """Each click is a 1, and items drawn uniformly among those that have appeared are 0s. Per event."""

    name = "isgd_negatives"

    def __init__(
        self, users: int, items: int, factors: int = 64, rate: float = 0.2, decay: float = 0.01, negatives: int = 10,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.settings: dict[str, Any] = {
            "factors": factors, "rate": rate, "decay": decay, "negatives": negatives, "seed": seed,
        }  # fmt: skip
        self._rng = np.random.default_rng(seed)
        self._users = self._rng.normal(0, 0.1, (users, factors)).astype(np.float32)
        self._items = self._rng.normal(0, 0.1, (items, factors)).astype(np.float32)
        self._rate, self._decay, self._negatives = rate, decay, negatives
        self._appeared = 1

    def score(self, user: int, clicked: Int32, scores: Float64) -> None:  # noqa: ARG002
        """Dot products."""
        _score(self._users[user], self._items, scores)

    def learn(self, user: int, clicked: Int32, item: int) -> None:
        """One step for each negative, then one for the click."""
        self._appeared = max(self._appeared, item + 1)
        negatives = self._rng.integers(0, self._appeared, self._negatives, np.int32)
        _learn(self._users[user], self._items, item, negatives, clicked, self._rate, self._decay)
