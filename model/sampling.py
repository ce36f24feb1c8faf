"""What is learned beside the new events: negatives, and past events again."""

import numpy as np
import torch

from model.batch import Bool, Float32, Int32, Int64, PastEvents
from model.kernels import kernel
from model.state import State


def generator(seed: int, stream: str, step: int) -> np.random.Generator:
    """A generator that depends on nothing but its key: no random state needs to be saved."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, *stream.encode(), step))))


class NegativeSampler:
    """Draws items by their number of clicks to a power, with replacement.

    The popularity^0.75 of word2vec (Mikolov et al. 2013), corrected by logQ (Bengio & Senécal 2008).
    """

    def __init__(self, power: float) -> None:
        self.power = power
        self.clicks = np.zeros(1024, np.int64)  # by item row, over the item's whole life here
        self._weight = np.zeros(1024, np.float64)  # clicks ** power

    def grow(self, rows: int) -> None:
        """Hold at least `rows` item rows."""
        if rows > len(self.clicks):
            more = max(rows, 2 * len(self.clicks)) - len(self.clicks)
            self.clicks = np.concatenate([self.clicks, np.zeros(more, np.int64)])
            self._weight = np.concatenate([self._weight, np.zeros(more)])

    def count(self, items: Int32) -> None:
        """One click for each of `items` (n,)."""
        np.add.at(self.clicks, items, 1)
        self.clicks[0] = 0
        self._weight[items] = self.clicks[items].astype(np.float64) ** self.power * (items > 0)

    def forget(self, items: Int32) -> None:
        """Evicted rows are not drawn."""
        self.clicks[items] = 0
        self._weight[items] = 0.0

    def draw(self, count: int, rng: np.random.Generator) -> Int32:
        """`count` item rows; all 0 while nothing was clicked yet."""
        cumulated = np.cumsum(self._weight)
        drawn = np.searchsorted(cumulated, rng.random(count) * cumulated[-1], side="right")
        return np.where(cumulated[-1] > 0, drawn, 0).astype(np.int32)

    def log_expected(self, items: Int32, count: int) -> Float32:
        """log of how often each of `items` is expected among `count` draws."""
        total = self._weight.sum()
        share = np.maximum(self._weight[items], 1e-12) / max(total, 1e-12)
        expected: Float32 = np.log(count * share).astype(np.float32)
        return expected

    def state(self, rows: int) -> State:
        """Tensors and plain data that `load` takes."""
        return {"clicks": torch.from_numpy(self.clicks[:rows].copy())}

    def load(self, state: State) -> None:
        """Become the sampler whose `state` this is."""
        clicks = state["clicks"]
        self.clicks = clicks.numpy().copy()
        self._weight = self.clicks.astype(np.float64) ** self.power
        self._weight[self.clicks == 0] = 0.0
        self.grow(1024)


@kernel
def block_seen(
    negatives: Int32, positives: Int32, seen_items: Int32, seen_ends: Int64, table_rows: int, blocked: Bool
) -> None:
    """blocked (B, K): the negative is the event's own item, or one that its user has already clicked."""
    first = np.full(table_rows, -1, np.int32)  # by item row: one place among the negatives
    following = np.full(negatives.shape[0], -1, np.int32)  # by place: the next place of the same item
    for k in range(negatives.shape[0]):
        following[k] = first[negatives[k]]
        first[negatives[k]] = k
    begin = 0
    for n in range(positives.shape[0]):
        k = first[positives[n]]
        while k >= 0:
            blocked[n, k] = True
            k = following[k]
        for i in range(begin, seen_ends[n]):
            k = first[seen_items[i]]
            while k >= 0:
                blocked[n, k] = True
                k = following[k]
        begin = seen_ends[n]


class ReplayBuffer:
    """The newest events, to be learned again: drawn by an exponential age with mean `mean_age` events.

    Four mean ages are kept, beyond which lie 2% of the draws.
    """

    def __init__(self, mean_age: int) -> None:
        self.mean_age = mean_age
        size = 4 * mean_age
        self._columns = PastEvents(
            np.zeros(size, np.int32), np.zeros(size, np.int32), np.zeros(size, np.int64),
            np.zeros(size, np.float32), np.zeros(size, np.int64),
        )  # fmt: skip
        self._added = 0  # events ever

    def add(self, events: PastEvents) -> None:
        """Keep `events`, in order; the oldest make room."""
        where = (self._added + np.arange(len(events))) % len(self._columns)
        for name in PastEvents.__slots__:
            getattr(self._columns, name)[where] = getattr(events, name)
        self._added += len(events)

    def draw(self, count: int, rng: np.random.Generator) -> PastEvents:
        """`count` past events with replacement, fewer than that only while there are none."""
        kept = min(self._added, len(self._columns))
        if kept == 0:
            count = 0
        newest = 1.0 - np.exp(-kept / self.mean_age)  # the share of the exponential that is still here
        age = (-self.mean_age * np.log1p(-rng.random(count) * newest)).astype(np.int64).clip(0, kept - 1)
        where = (self._added - 1 - age) % len(self._columns)
        return PastEvents(*(getattr(self._columns, name)[where] for name in PastEvents.__slots__))

    def forget_users(self, users: Bool) -> None:
        """Events of evicted users (by row) are no longer learned from."""
        self._forget(users[self._columns.users])

    def forget_items(self, items: Bool) -> None:
        """Events of evicted items (by row) are no longer learned from."""
        self._forget(items[self._columns.items])

    def _forget(self, gone: Bool) -> None:
        self._columns.users[gone] = 0
        self._columns.items[gone] = 0
        self._columns.weights[gone] = 0.0

    def state(self) -> State:
        """Tensors and plain data that `load` takes."""
        kept = min(self._added, len(self._columns))
        where = (self._added - kept + np.arange(kept)) % len(self._columns)
        columns = {n: torch.from_numpy(getattr(self._columns, n)[where]) for n in PastEvents.__slots__}
        return {"added": self._added, **columns}

    def load(self, state: State) -> None:
        """Become the buffer whose `state` this is; another mean age keeps the newest that fit."""
        added = state["added"]
        columns = [state[name] for name in PastEvents.__slots__]
        arrays = [c.numpy()[-len(self._columns) :] for c in columns]
        self._added = added - len(arrays[0])
        self.add(PastEvents(*arrays))
