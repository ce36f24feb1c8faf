"""Item-kNN with recency: who clicked this clicked that soon after, weighted by how soon, and by how lately."""

from typing import Any

import numpy as np

from model.batch import Float32, Float64, Int32, Int64
from model.kernels import kernel


@kernel
def _score(
    clicked: Int32, together: Float32, clicks: Int64, newest: int, decay: float, alpha: float, scores: Float64
) -> None:
    scores[:] = 0
    for age in range(min(newest, clicked.shape[0])):
        item = clicked[clicked.shape[0] - 1 - age]
        weight = decay**age / max(1, clicks[item]) ** alpha
        for j in range(scores.shape[0]):
            scores[j] += weight * together[item, j]


@kernel
def _learn(clicked: Int32, item: int, together: Float32, newest: int, reach: float) -> None:
    for age in range(min(newest, clicked.shape[0])):
        other = clicked[clicked.shape[0] - 1 - age]
        if other != item:
            weight = np.exp(-(age + 1) / reach)
            together[other, item] += weight
            together[item, other] += weight


class RecencyItemKnn:
    """s(j) = Σ over the user's last 40 items y, the newest at age 0, of 0.8^age · C(y, j) / (n_y^.7 · n_j^.3).

    C(y, j) is the sum, over all users who clicked y and j with at most 40 clicks between them, of exp(−gap / 5); n
    are clicks so far. Per event.
    """

    name = "item_knn_recency"

    def __init__(
        self, items: int, newest: int = 40, decay: float = 0.8, reach: float = 5.0, alpha: float = 0.7
    ) -> None:
        self.settings: dict[str, Any] = {"newest": newest, "decay": decay, "reach": reach, "alpha": alpha}
        self._together = np.zeros((items, items), np.float32)
        self._clicks = np.zeros(items, np.int64)
        self._damping: Float64 = np.zeros(items)  # n_j^(alpha − 1)
        self._newest, self._decay, self._reach, self._alpha = newest, decay, reach, alpha

    def score(self, user: int, clicked: Int32, scores: Float64) -> None:  # noqa: ARG002
        """The sum above."""
        _score(clicked, self._together, self._clicks, self._newest, self._decay, self._alpha, scores)
        scores *= self._damping[: len(scores)]

    def learn(self, user: int, clicked: Int32, item: int) -> None:  # noqa: ARG002
        """Count the pairs of the click with those before it."""
        _learn(clicked, item, self._together, self._newest, self._reach)
        self._clicks[item] += 1
        self._damping[item] = float(self._clicks[item]) ** (self._alpha - 1)
