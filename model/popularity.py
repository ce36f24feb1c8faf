"""Popularity: the number of an item's clicks, of which half are forgotten every `half_life` events."""

import numpy as np
import torch

from model.batch import Bool, Float64, Int32, Int64
from model.kernels import kernel
from model.state import State

_REBASE = 64  # half-lives after which the stored weights are scaled down, far from overflow


@kernel
def _rank_and_add(
    items: Int32,
    positive: Bool,
    weight: Float64,
    first_seen: Int64,
    sequence: Int64,
    seen_items: Int32,
    seen_ends: Int64,
    gain: Float64,
    ranked: Bool,
    ranks: Int64,
) -> None:
    """For each event in turn: the rank of its item by popularity so far, then the item's own click."""
    seen = np.zeros(weight.shape[0], np.bool_)
    begin = 0
    for n in range(items.shape[0]):
        item, end = items[n], seen_ends[n]
        if ranked[n]:
            for i in range(begin, end):
                seen[seen_items[i]] = True
            ranks[n] = -1
            if item > 0 and first_seen[item] < sequence[n] and not seen[item]:
                above = 0
                for j in range(1, weight.shape[0]):
                    if (
                        first_seen[j] < sequence[n]
                        and not seen[j]
                        and (
                            weight[j] > weight[item] or (weight[j] == weight[item] and first_seen[j] < first_seen[item])
                        )
                    ):
                        above += 1
                ranks[n] = above
            for i in range(begin, end):
                seen[seen_items[i]] = False
        if item > 0 and positive[n]:
            weight[item] += gain[n]
        begin = end


class Popularity:
    """Decayed click counts by item row. The weight of a click at event n is 2^((n − base) / half_life)."""

    def __init__(self, half_life: int) -> None:
        self.half_life = half_life
        self.weight = np.zeros(1024, np.float64)  # by item row
        self._base = 0
        self._newest = 0

    def grow(self, rows: int) -> None:
        """Hold at least `rows` item rows."""
        if rows > len(self.weight):
            self.weight = np.concatenate([self.weight, np.zeros(max(rows, 2 * len(self.weight)) - len(self.weight))])

    def rank_and_add(
        self,
        items: Int32,
        positive: Bool,
        sequence: Int64,
        first_seen: Int64,
        seen: tuple[Int32, Int64],
        ranked: Bool,
    ) -> Int64:
        """Rank each event's item among the items that were there and unseen, then count the event.

        items, positive, sequence, ranked (n,): events in order; only those `ranked` are. first_seen (rows,): the
        event at which an item appeared. seen: items each user had seen (flat) and where each event's end (n,).
        Returns 0-based ranks (n,), -1 for a miss: an item that was new, or that the user had already clicked.
        """
        gain = self._gains(sequence)
        ranks = np.full(len(items), -1, np.int64)
        rows = min(len(first_seen), len(self.weight))
        _rank_and_add(items, positive, self.weight[:rows], first_seen[:rows], sequence, *seen, gain, ranked, ranks)
        return ranks

    def add(self, items: Int32, sequence: Int64) -> None:
        """Count clicks on `items` (n,) by the numbers (n,) of their events, in order."""
        np.add.at(self.weight, items, self._gains(sequence) * (items > 0))

    def _gains(self, sequence: Int64) -> Float64:
        """What the events' clicks weigh (n,); the last of them is the newest from now on."""
        if not len(sequence):
            return np.empty(0)
        if sequence[-1] - self._base > _REBASE * self.half_life:
            self.weight *= 2.0 ** ((self._base - int(sequence[0])) / self.half_life)
            self._base = int(sequence[0])
        self._newest = int(sequence[-1])
        return np.exp2((sequence - self._base) / self.half_life)

    def forget(self, items: Int32) -> None:
        """Evicted rows count nothing."""
        self.weight[items] = 0.0

    def counts(self, rows: int, now: int | None = None) -> Float64:
        """Clicks (rows,), decayed as of the event with number `now` (default: the newest)."""
        decay: float = 2.0 ** ((self._base - (self._newest if now is None else now)) / self.half_life)
        return self.weight[:rows] * decay

    def state(self, rows: int) -> State:
        """Tensors and plain data that `load` takes."""
        weight = torch.from_numpy(self.weight[:rows].copy())
        return {"weight": weight, "base": self._base, "newest": self._newest}

    def load(self, state: State) -> None:
        """Become the popularity whose `state` this is."""
        weight, base, newest = state["weight"], state["base"], state["newest"]
        self.weight, self._base, self._newest = weight.numpy().copy(), base, newest
        self.grow(1024)
