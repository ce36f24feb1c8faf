"""What the attributes of an item tell about its vector, for items that nobody has clicked yet.

Each attribute and each word of a title is a feature, hashed into a table. A feature's row is its share of the vectors
of the items that carry it: after each mini-batch, the rows of its items' features take a step towards the items'
vectors as they are by then (normalised least mean squares, Widrow and Hoff 1960). So the cost is that of the
mini-batch, whatever the size of the catalogue, and what is told of a new item follows the weights as they move.
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.batch import Int32
from model.state import State

PER_ITEM = 24  # features of one item, at most
_WORDS = 8  # of its title, at most
_DEPTH = 3
_WORD = re.compile(r"\w+")
_EVERY_ITEM = 1  # the slot of a feature that every item has; slot 0 is none
_ROWS_AT_ONCE = 64
_RATE = 0.3


def feature_hashes(title: str, attributes: Mapping[str, Any]) -> Int32:
    """Features (PER_ITEM,) of an item as hashes from 1 on, 0 = none: attributes first, then words of the title."""
    words = (f"word\x1f{word}" for word in _WORD.findall(title.lower())[:_WORDS])
    names = dict.fromkeys([*_named(attributes, "", _DEPTH), *words])
    found = [zlib.crc32(name.encode()) & 0x7FFFFFFF or 1 for name in names][:PER_ITEM]
    return np.array(found + [0] * (PER_ITEM - len(found)), np.int32)


def _named(value: object, name: str, depth: int) -> Iterator[str]:
    """`{"genres": ["War"], "year": 1995}` gives genres=war, year=1995, year~199 (its tenth)."""
    if isinstance(value, Mapping) and depth:
        for key, inner in value.items():
            yield from _named(inner, f"{name}\x1f{key}", depth - 1)
    elif isinstance(value, list) and depth:
        for inner in value:
            yield from _named(inner, name, depth - 1)
    elif isinstance(value, str | bool):
        yield f"{name}={str(value).lower()}"
    elif isinstance(value, int | float):
        yield f"{name}={value}"
        yield f"{name}~{value // 10}"


class ItemFeatures:
    """The features of item rows, and what each feature tells about an item's vector."""

    def __init__(self, slots: int, width: int, device: torch.device) -> None:
        self.slots = slots  # 0: nothing is told of any item
        self.weight = torch.zeros(slots + 2, width, device=device)  # row 0 stays zero
        self.hashes = np.zeros((1024, PER_ITEM), np.int32)  # by item row
        self.cursor = 1  # the item row from which on unclicked items are placed next

    def grow(self, rows: int) -> None:
        """Hold at least so many item rows."""
        if (more := rows - len(self.hashes)) > 0:
            self.hashes = np.concatenate([self.hashes, np.zeros((max(more, len(self.hashes)), PER_ITEM), np.int32)])

    def describe(self, rows: Int32, hashes: Int32) -> None:
        """Item `rows` (n,) have the features `hashes` (n, PER_ITEM) from now on."""
        self.hashes[rows] = hashes

    def forget(self, rows: Int32) -> None:
        """Nothing is known of item `rows`."""
        self.hashes[rows] = 0

    def known(self, rows: Int32) -> Int32:
        """Those of item `rows` that have features."""
        known: Int32 = rows[self.hashes[rows, 0] > 0]
        return known

    @property
    def learned(self) -> bool:
        """Whether anything can be told."""
        return bool(self.weight[_EVERY_ITEM].any())

    def next_rows(self, rows: int) -> Int32:
        """The next of the first `rows` item rows, in turn: so that following the features costs a bounded time."""
        start = self.cursor if self.cursor < rows else 1
        self.cursor = start + _ROWS_AT_ONCE
        return np.arange(start, min(self.cursor, rows), dtype=np.int32)

    def told(self, rows: Int32) -> Tensor:
        """What its features tell about the vector of each of item `rows` (n,): (n, width)."""
        return self.weight[self._slots(rows)].sum(1)

    def learn(self, rows: Int32, vectors: Tensor) -> None:
        """Step towards `vectors` (n, width), which distinct item `rows` (n,) with features have now."""
        slots = self._slots(rows)  # (n, PER_ITEM + 1)
        carried = (slots > 0).sum(1, keepdim=True)
        wrong = vectors - self.weight[slots].sum(1)  # (n, width)
        step = torch.where(torch.isfinite(wrong), wrong, 0.0) * (_RATE / carried)
        # One step for a feature, however many items of the mini-batch carry it.
        carriers = torch.bincount(slots.reshape(-1), minlength=len(self.weight))
        step = step.unsqueeze(1) / carriers[slots].unsqueeze(2)
        self.weight.index_add_(0, slots.reshape(-1), step.reshape(-1, step.shape[2]))
        self.weight[0] = 0.0

    def _slots(self, rows: Int32) -> Tensor:
        hashes = self.hashes[rows].astype(np.int64)
        slots = np.where(hashes > 0, 2 + hashes % self.slots, 0)
        every = np.full((len(rows), 1), _EVERY_ITEM)
        return torch.from_numpy(np.concatenate([every, slots], axis=1)).to(self.weight.device)

    def state(self, rows: int) -> State:
        """Tensors and plain data that `load` takes."""
        hashes = torch.from_numpy(self.hashes[:rows].copy())
        return {"weight": self.weight.cpu().clone(), "hashes": hashes, "cursor": self.cursor}

    def load(self, state: State) -> None:
        """Become the features whose `state` this is; another number of slots learns its table anew."""
        weight, hashes = state["weight"], state["hashes"]
        self.hashes, self.cursor = hashes.numpy().copy(), state["cursor"]
        self.grow(1024)
        if weight.shape == self.weight.shape:
            self.weight = weight.to(self.weight.device, copy=True)
