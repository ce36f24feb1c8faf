"""The recent interaction graph between items: who is clicked beside whom."""

import numpy as np
import torch

from model.batch import Bool, Int32, Int64
from model.kernels import kernel
from model.state import State


@kernel
def _join(items: Int32, before: Int32, near: Int32, count: Int64) -> None:
    """In order, so that the result does not depend on how the events were grouped."""
    for n in range(items.shape[0]):
        for k in range(before.shape[1]):
            one, other = items[n], before[n, k]
            if 0 in (one, other) or one == other:
                continue
            near[one, count[one] % near.shape[1]] = other
            near[other, count[other] % near.shape[1]] = one
            count[one] += 1
            count[other] += 1


@kernel
def _forget(near: Int32, evicted: Bool) -> None:
    for row in range(near.shape[0]):
        for k in range(near.shape[1]):
            if evicted[near[row, k]]:
                near[row, k] = 0


class ItemGraph:
    """For every item row a ring of its newest `width` neighbours, as often as they were met."""

    def __init__(self, width: int) -> None:
        self.near = np.zeros((1024, width), np.int32)  # by item row; 0 = none yet, or evicted since
        self.count = np.zeros(1024, np.int64)  # by item row: neighbours ever met, = its degree

    def grow(self, rows: int) -> None:
        """Hold at least `rows` item rows."""
        if rows > len(self.count):
            more = max(rows, 2 * len(self.count)) - len(self.count)
            self.near = np.concatenate([self.near, np.zeros((more, self.near.shape[1]), np.int32)])
            self.count = np.concatenate([self.count, np.zeros(more, np.int64)])

    def join(self, items: Int32, before: Int32) -> Int32:
        """Join each of `items` (n,) with those clicked just `before` it (n, m), 0 = none; both ways, in order.

        Returns the distinct rows whose rings or counts may have changed.
        """
        _join(items, before, self.near, self.count)
        changed: Int32 = np.unique(np.concatenate([items, before.reshape(-1)]))
        return changed

    def forget(self, items: Int32) -> None:
        """Take evicted `items` out of every ring; their places stay empty until the ring comes round to them."""
        evicted = np.zeros(len(self.count), np.bool_)
        evicted[items] = True
        _forget(self.near, evicted)
        self.near[items] = 0
        self.count[items] = 0

    def state(self, rows: int) -> State:
        """Tensors and plain data that `load` takes, for the first `rows` item rows."""
        return {"near": torch.from_numpy(self.near[:rows].copy()), "count": torch.from_numpy(self.count[:rows].copy())}

    def load(self, state: State) -> None:
        """Become the graph whose `state` this is. Raises ValueError for rings of another width."""
        near, count = state["near"], state["count"]
        if near.shape[1] != self.near.shape[1]:
            raise ValueError(f"saved rings have {near.shape[1]} places, these {self.near.shape[1]}")
        self.near, self.count = near.numpy().copy(), count.numpy().copy()
        self.grow(1024)
