"""Which items are clicked together, and in which order: sparse counts that grow with every click.

The recency-weighted co-occurrence of sequential item-kNN recommenders (Ludewig & Jannach 2018): when a user clicks x,
the pair (y, x) with the item y that it clicked k clicks before gains exp(-k / 5).
"""

import numpy as np
import torch

from model.batch import Bool, Float32, Int32, Int64
from model.kernels import kernel
from model.state import State

SMALLEST = 8  # places in an item's first block
REACH = 40  # clicks back that a pair reaches
_GAINS = np.exp(-np.arange(1, REACH + 1) / 5.0).astype(np.float32)  # (REACH,) by age of the earlier click, newest first
_NOBODY = 0  # key of an empty place: item row 0
_LARGEST_ARENA = 2**31 - 1  # places: free blocks are linked by 32-bit numbers


@kernel
def _place(row: int, key: int, start: Int64, size: Int32, keys: Int32) -> int:
    """Where `key` is in the row's block, or the empty place where it belongs. Linear probing; no block is ever full."""
    mask = size[row] - 1
    at = ((np.int64(key) * np.int64(2654435761)) >> 7) & mask
    while keys[start[row] + at] != _NOBODY and keys[start[row] + at] != key:
        at = (at + 1) & mask
    return int(start[row] + at)


@kernel
def _move(
    row: int, to: int, places: int, drop: int, start: Int64, size: Int32, used: Int32, keys: Int32, weights: Float32,
) -> None:  # fmt: skip
    """Move the row's pairs, but the `drop` weakest, to the empty block of `places` at `to`, or within its own."""
    count = used[row]
    old_keys, old = np.empty(count, np.int32), np.empty((count, 2), np.float32)
    n = 0
    for p in range(start[row], start[row] + size[row]):
        if keys[p] != _NOBODY:
            old_keys[n], old[n, 0], old[n, 1] = keys[p], weights[p, 0], weights[p, 1]
            n += 1
        keys[p] = _NOBODY
        weights[p, 0] = weights[p, 1] = 0.0
    start[row], size[row], used[row] = to, places, count - drop
    strength = old[:, 0] + old[:, 1]
    least = np.sort(strength)[drop] if drop else np.float32(0.0)
    ties = drop - np.sum(strength < least)  # of those that weigh just `least`, the first ones go
    for n in range(count):
        if strength[n] < least:
            continue
        if strength[n] == least and ties > 0:
            ties -= 1
            continue
        p = _place(row, old_keys[n], start, size, keys)
        keys[p], weights[p, 0], weights[p, 1] = old_keys[n], old[n, 0], old[n, 1]


@kernel
def _class_of(places: int) -> int:
    klass = 0
    while SMALLEST << klass < places:
        klass += 1
    return klass


@kernel
def _give_back(block: int, places: int, keys: Int32, free: Int64) -> None:
    """Put an emptied block at the head of its list."""
    head = 1 + _class_of(places)
    keys[block] = free[head]
    free[head] = block


@kernel
def _make_room(
    row: int, largest: int, start: Int64, size: Int32, used: Int32, keys: Int32, weights: Float32, free: Int64,
) -> None:  # fmt: skip
    """See to it that the row can take one more pair, in a larger block or in place of its weakest pairs.

    free[0] is the first place of the arena never used; free[1 + c] heads the list of free blocks of class c
    (SMALLEST · 2^c places), linked through the keys of their first places; -1 ends a list.
    """
    if 4 * (used[row] + 1) <= 3 * size[row]:
        return
    if size[row] == largest:
        _move(row, start[row], largest, used[row] // 4, start, size, used, keys, weights)
        return
    wanted = max(SMALLEST, 2 * size[row])
    head = 1 + _class_of(wanted)
    block = free[head]
    if block >= 0:
        free[head] = keys[block]
        keys[block] = _NOBODY
    else:
        block = free[0]
        free[0] += wanted
    old, old_size = start[row], size[row]
    _move(row, block, wanted, 0, start, size, used, keys, weights)
    if old_size > 0:
        _give_back(old, old_size, keys, free)


@kernel
def _add(
    items: Int32, history: Int32, gains: Float32, largest: int,
    start: Int64, size: Int32, used: Int32, keys: Int32, weights: Float32, free: Int64,
) -> int:  # fmt: skip
    """Count each click's pairs, in order; returns how many clicks were done before the arena was too full for one."""
    for n in range(items.shape[0]):
        if free[0] + 2 * gains.shape[0] * largest > keys.shape[0]:
            return n
        x = items[n]
        for k in range(min(history.shape[1], gains.shape[0])):
            y = history[n, k]
            if x <= 0 or y <= 0 or x == y:
                continue
            for side in range(2):  # a pair is kept with both its items: column 0 after this item, 1 before it
                row, key = (y, x) if side == 0 else (x, y)
                p = _place(row, key, start, size, keys) if size[row] > 0 else np.int64(-1)
                if p < 0 or keys[p] != key:
                    _make_room(row, largest, start, size, used, keys, weights, free)
                    p = _place(row, key, start, size, keys)
                    keys[p] = key
                    used[row] += 1
                weights[p, side] += gains[k]
    return len(items)


@kernel
def _forget(evicted: Bool, start: Int64, size: Int32, used: Int32, keys: Int32, weights: Float32, free: Int64) -> None:
    for row in range(1, evicted.shape[0]):
        if size[row] == 0:
            continue
        gone = 0
        for p in range(start[row], start[row] + size[row]):
            if evicted[row] or (keys[p] != _NOBODY and evicted[keys[p]]):
                weights[p, 0] = weights[p, 1] = -1.0  # the weakest
                gone += keys[p] != _NOBODY
        if evicted[row]:
            keys[start[row] : start[row] + size[row]] = _NOBODY
            weights[start[row] : start[row] + size[row]] = 0.0
            _give_back(start[row], size[row], keys, free)
            start[row] = size[row] = used[row] = 0
        elif gone:
            _move(row, start[row], size[row], gone, start, size, used, keys, weights)


class Cooccurrence:
    """For each item row the items that were clicked after and before it, at most 3/4 of `neighbours` of them."""

    def __init__(self, neighbours: int) -> None:
        self.largest = SMALLEST
        while self.largest < neighbours:
            self.largest *= 2
        self.start = np.zeros(1024, np.int64)  # by item row: first place of its block
        self.size = np.zeros(1024, np.int32)  # by item row: places in its block, 0 = no block yet
        self.used = np.zeros(1024, np.int32)  # by item row: pairs in its block
        self.keys = np.zeros(0, np.int32)  # by place: the other item's row
        self.weights = np.zeros((0, 2), np.float32)  # by place: clicks of the other item after, before this one
        self._free = np.full(2 + (self.largest // SMALLEST).bit_length(), -1, np.int64)
        self._free[0] = 0

    def grow(self, rows: int) -> None:
        """Hold at least `rows` item rows."""
        if rows > len(self.start):
            more = max(rows, 2 * len(self.start)) - len(self.start)
            self.start = np.concatenate([self.start, np.zeros(more, np.int64)])
            self.size = np.concatenate([self.size, np.zeros(more, np.int32)])
            self.used = np.concatenate([self.used, np.zeros(more, np.int32)])

    def add(self, items: Int32, history: Int32) -> None:
        """Count the pairs of clicks on `items` (n,), each after its user's `history` (n, L), newest first, 0 = none."""
        done = 0
        while True:
            table = (self.start, self.size, self.used, self.keys, self.weights)
            done += _add(items[done:], history[done:], _GAINS, self.largest, *table, self._free)
            if done == len(items):
                return
            self._grow_arena()

    def _grow_arena(self) -> None:
        more = len(self.keys) // 2 + 4 * REACH * self.largest
        if len(self.keys) + more > _LARGEST_ARENA:
            raise MemoryError("the co-occurrence counts are full: a smaller model.neighbours is needed")
        self.keys = np.concatenate([self.keys, np.zeros(more, np.int32)])
        self.weights = np.concatenate([self.weights, np.zeros((more, 2), np.float32)])

    def pairs(self, item: int) -> tuple[Int32, Float32]:
        """The items (n,) that were clicked with `item`, ascending, and how often after and before it (n, 2)."""
        block = slice(self.start[item], self.start[item] + self.size[item])
        there = np.flatnonzero(self.keys[block]) + self.start[item]
        there = there[np.argsort(self.keys[there])]
        return self.keys[there], self.weights[there]

    def forget(self, items: Int32, item_rows: int) -> None:
        """Take `items` out, with all their pairs."""
        evicted = np.zeros(item_rows, np.bool_)
        evicted[items] = True
        _forget(evicted, self.start, self.size, self.used, self.keys, self.weights, self._free)

    def state(self, rows: int) -> State:
        """Tensors and plain data that `load` takes, for the first `rows` item rows."""
        end = int(self._free[0])
        return {
            "start": torch.from_numpy(self.start[:rows].copy()),
            "size": torch.from_numpy(self.size[:rows].copy()),
            "used": torch.from_numpy(self.used[:rows].copy()),
            "keys": torch.from_numpy(self.keys[:end].copy()),
            "weights": torch.from_numpy(self.weights[:end].copy()),
            "free": torch.from_numpy(self._free.copy()),
        }

    def load(self, state: State) -> None:
        """Become the counts whose `state` this is."""
        arrays = {name: value.numpy().copy() for name, value in state.items()}
        if len(arrays["free"]) != len(self._free):
            raise ValueError(f"these counts were made for another limit than {self.largest} neighbours")
        self.start, self.size, self.used, self._free = (arrays[n] for n in ("start", "size", "used", "free"))
        self.keys, self.weights = arrays["keys"], arrays["weights"]
        self.grow(1024)
