"""The most popular items, the same for everybody: clicks of which half are forgotten every so many events."""

from typing import Any

import numpy as np

from model.batch import Float64, Int32


class Popular:
    """Counts with a half-life, per event; the worker's own baseline again, with lists."""

    name = "popularity"

    def __init__(self, items: int, half_life: int = 10_000) -> None:
        self.settings: dict[str, Any] = {"half_life": half_life}
        self._weight, self._gain = np.zeros(items), 1.0
        self._growth = 2.0 ** (1 / half_life)

    def score(self, user: int, clicked: Int32, scores: Float64) -> None:  # noqa: ARG002
        """The counts so far."""
        scores[:] = self._weight[: len(scores)] / self._gain

    def learn(self, user: int, clicked: Int32, item: int) -> None:  # noqa: ARG002
        """Count a click."""
        self._gain *= self._growth
        self._weight[item] += self._gain
        if self._gain > 2.0**64:
            self._weight /= self._gain
            self._gain = 1.0
