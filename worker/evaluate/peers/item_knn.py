"""Item-kNN with recency: who clicked this clicked that soon after, weighted by how soon, and by how lately."""

from typing import Any

import numpy as np

from model.batch import Float64, Int32
from worker.evaluate.peers.pairs import pairs


class RecencyItemKnn:
    """s(j) = Σ over the user's last 40 items y, the newest at age 0, of 0.8^age · C(y, j) / (n_y^.7 · n_j^.3).

    C(y, j) is the sum, over all users who clicked y and j with less than 40 clicks between them, of exp(−gap / 5); n
    are clicks so far and 5 more, without which rare pairs go before all others. Per event.
    """

    name = "item_knn_recency"

    def __init__(
        self,
        items: int,
        newest: int = 40,
        decay: float = 0.8,
        reach: float = 5.0,
        alpha: float = 0.7,
        shrinkage: float = 5.0,
    ) -> None:
        self.settings: dict[str, Any] = {
            "newest": newest,
            "decay": decay,
            "reach": reach,
            "alpha": alpha,
            "shrinkage": shrinkage,
        }
        self._pairs = pairs(items)
        self._by_age, self._by_gap = decay ** np.arange(newest), np.exp(-np.arange(1, newest + 1) / reach)  # (newest,)
        self._clicks = np.zeros(items, np.int64)
        self._of_history = np.full(items, shrinkage**-alpha)  # (items,) n^−alpha
        self._of_candidate = np.full(items, shrinkage ** (alpha - 1))
        self._newest, self._alpha, self._shrinkage = newest, alpha, shrinkage

    def score(self, user: int, clicked: Int32, scores: Float64) -> None:  # noqa: ARG002
        """The sum above."""
        newest_first = clicked[::-1][: self._newest]
        scores[:] = 0
        self._pairs.weigh(newest_first, self._by_age[: len(newest_first)] * self._of_history[newest_first], scores)
        scores *= self._of_candidate[: len(scores)]

    def learn(self, user: int, clicked: Int32, item: int) -> None:  # noqa: ARG002
        """Count the pairs of the click with those before it."""
        newest_first = clicked[::-1][: self._newest]
        self._pairs.add(newest_first, self._by_gap[: len(newest_first)], item)
        self._clicks[item] += 1
        clicks = float(self._clicks[item]) + self._shrinkage
        self._of_history[item], self._of_candidate[item] = clicks**-self._alpha, clicks ** (self._alpha - 1)
