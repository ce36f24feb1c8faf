"""Sums over pairs of items: a matrix where it fits, and lists of what there is where there are too many items."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from model.batch import Float32, Float64, Int32, Int64
from model.kernels import kernel

MATRIX_ITEMS = 12_000  # up to so many items: 576 MB
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio

Hashes = NDArray[np.uint64]


class Pairs(Protocol):
    """A symmetric sum for each pair of different items."""

    def add(self, others: Int32, weights: Float64, item: int) -> None:
        """Add `weights` (n,) to the pairs of `others` (n,) with an item."""
        ...

    def weigh(self, items: Int32, weights: Float64, scores: Float64) -> None:
        """Add to scores (n,) the rows of `items` (m,), each times its weight."""
        ...


@kernel
def _add(others: Int32, weights: Float64, item: int, together: Float32) -> None:
    for n in range(others.shape[0]):
        if others[n] != item:
            together[others[n], item] += weights[n]
            together[item, others[n]] += weights[n]


@kernel
def _weigh(items: Int32, weights: Float64, together: Float32, scores: Float64) -> None:
    for n in range(items.shape[0]):
        for j in range(scores.shape[0]):
            scores[j] += weights[n] * together[items[n], j]


class Matrix:
    """All pairs, items × items."""

    def __init__(self, items: int) -> None:
        self._together = np.zeros((items, items), np.float32)

    def add(self, others: Int32, weights: Float64, item: int) -> None:
        """As `Pairs`."""
        _add(others, weights, item, self._together)

    def weigh(self, items: Int32, weights: Float64, scores: Float64) -> None:
        """As `Pairs`."""
        _weigh(items, weights, self._together, scores)


@kernel
def _place(key: int, keys: Int64, table: Int32) -> int:
    """Where in the table the entry of `key` is, or would be."""
    place: int = np.int64((np.uint64(key) * _SPREAD) >> np.uint64(20)) % table.shape[0]
    while table[place] >= 0 and keys[table[place]] != key:
        place = (place + 1) % table.shape[0]
    return place


@kernel
def _add_listed(
    others: Int32, weights: Float64, item: int, heads: Int32, keys: Int64, sums: Float32, nexts: Int32, table: Int32,
    used: int,
) -> int:  # fmt: skip
    for n in range(others.shape[0]):
        other = np.int64(others[n])
        if other == item:
            continue
        for a, b in ((other, np.int64(item)), (np.int64(item), other)):
            key = a * heads.shape[0] + b
            place = _place(key, keys, table)
            if table[place] < 0:
                table[place], keys[used], sums[used], nexts[used] = used, key, 0.0, heads[a]
                heads[a] = used
                used += 1
            sums[table[place]] += weights[n]
    return used


@kernel
def _weigh_listed(
    items: Int32, weights: Float64, heads: Int32, keys: Int64, sums: Float32, nexts: Int32, scores: Float64
) -> None:
    for n in range(items.shape[0]):
        entry = heads[items[n]]
        while entry >= 0:
            scores[keys[entry] % heads.shape[0]] += weights[n] * sums[entry]
            entry = nexts[entry]


@kernel
def _hashed(keys: Int64, used: int, table: Int32) -> None:
    for entry in range(used):
        table[_place(keys[entry], keys, table)] = entry


class Lists:
    """The pairs that there are: entries found by a hash of the pair, and linked for each item."""

    def __init__(self, items: int) -> None:
        self._heads = np.full(items, -1, np.int32)
        self._keys, self._sums, self._nexts = np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.int32)
        self._table, self._used = np.full(1, -1, np.int32), 0

    def add(self, others: Int32, weights: Float64, item: int) -> None:
        """As `Pairs`."""
        if self._used + 2 * len(others) > len(self._keys):
            self._grow(2 * len(self._keys) + 2 * len(others) + 1024)
        columns = (self._heads, self._keys, self._sums, self._nexts, self._table)
        self._used = _add_listed(others, weights, item, *columns, self._used)

    def _grow(self, entries: int) -> None:
        more = entries - len(self._keys)
        self._keys = np.concatenate([self._keys, np.zeros(more, np.int64)])
        self._sums = np.concatenate([self._sums, np.zeros(more, np.float32)])
        self._nexts = np.concatenate([self._nexts, np.zeros(more, np.int32)])
        self._table = np.full(2 * entries, -1, np.int32)
        _hashed(self._keys, self._used, self._table)

    def weigh(self, items: Int32, weights: Float64, scores: Float64) -> None:
        """As `Pairs`."""
        _weigh_listed(items, weights, self._heads, self._keys, self._sums, self._nexts, scores)


def pairs(items: int) -> Pairs:
    """For a number of items."""
    return Matrix(items) if items <= MATRIX_ITEMS else Lists(items)
