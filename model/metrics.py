"""Prequential metrics: every event is ranked before the model has learned from it."""

import numpy as np
import torch
from numpy.typing import NDArray

from model.batch import Int64
from model.state import State

K = 10
_BLOCKS = 4096  # of the curve; at that many, neighbours are merged
_FIGURES = ("recall_at_10", "ndcg_at_10", "mrr_at_10")


def figures(ranks: Int64) -> NDArray[np.float64]:
    """Hit, discounted gain and reciprocal rank (n, 3) at K of 0-based `ranks` (n,), -1 = a miss.

    One relevant item an event: NDCG = 1 / log2(rank + 2), reciprocal rank = 1 / (rank + 1), both 0 past K.
    """
    hit = (ranks >= 0) & (ranks < K)
    at = np.where(hit, ranks, 0)
    return np.stack([hit * 1.0, hit / np.log2(at + 2.0), hit / (at + 1.0)], axis=1)


class Curve:
    """Sums of the figures over the stream in blocks of equal size, so that any stretch can be read later."""

    def __init__(self, window: int) -> None:
        self.block = 1  # events in a block
        self.sums = np.zeros((_BLOCKS, len(_FIGURES)))
        self.events = 0
        self._recent = np.full(window, -2, np.int64)  # ranks, a ring; -2 = none yet

    def add(self, ranks: Int64) -> None:
        """The next events' ranks (n,)."""
        self._recent[(self.events + np.arange(len(ranks)))[-len(self._recent) :] % len(self._recent)] = ranks[
            -len(self._recent) :
        ]
        values = figures(ranks)
        while len(values):
            if self.events >= _BLOCKS * self.block:
                self._merge()
            part = values[: _BLOCKS * self.block - self.events]
            np.add.at(self.sums, (self.events + np.arange(len(part))) // self.block, part)
            self.events += len(part)
            values = values[len(part) :]

    def _merge(self) -> None:
        pairs = self.sums.reshape(-1, 2, len(_FIGURES)).sum(1)
        self.sums = np.concatenate([pairs, np.zeros_like(pairs)])
        self.block *= 2

    def mean(self, start: float = 0.0) -> dict[str, float]:
        """Means over the events from the share `start` of the stream on (0.5 = the last half)."""
        first = start * self.events / self.block
        whole = self.sums[int(np.ceil(first)) :].sum(0)
        part = self.sums[int(first)] * (np.ceil(first) - first)  # of a block that the boundary cuts
        return dict(zip(_FIGURES, ((whole + part) / max(1.0, (1 - start) * self.events)).tolist(), strict=True))

    def windowed(self) -> dict[str, float]:
        """Means over the newest events."""
        recent = self._recent[self._recent > -2]
        return dict(zip(_FIGURES, (figures(recent).sum(0) / max(1, len(recent))).tolist(), strict=True))

    def state(self) -> State:
        """Tensors and plain data that `load` takes."""
        newest = np.roll(self._recent, -(self.events % len(self._recent)))
        return {
            "block": self.block,
            "events": self.events,
            "sums": torch.from_numpy(self.sums.copy()),
            "recent": torch.from_numpy(newest[newest > -2].copy()),
        }

    def load(self, state: State) -> None:
        """Become the curve whose `state` this is; the window may have another length."""
        block, events, sums, recent = state["block"], state["events"], state["sums"], state["recent"]
        self.block, self.events, self.sums = block, events, sums.numpy().copy()
        newest = recent.numpy()[-len(self._recent) :]
        self._recent[:] = -2
        self._recent[(events - len(newest) + np.arange(len(newest))) % len(self._recent)] = newest


class Prequential:
    """The model's curve and, on the same events, that of the most popular items."""

    def __init__(self, window: int) -> None:
        self.curves = {"freshet": Curve(window), "popularity": Curve(window)}

    def add(self, model_ranks: Int64, popularity_ranks: Int64) -> None:
        """Ranks of the next events (n,) by the model and by popularity."""
        self.curves["freshet"].add(model_ranks)
        self.curves["popularity"].add(popularity_ranks)

    def report(self) -> dict[str, float]:
        """Figures of both over the whole stream, its last half and the window, by flat names."""
        found: dict[str, float] = {"events_ranked": self.curves["freshet"].events}
        for name, prefix in (("freshet", ""), ("popularity", "popularity_")):
            curve = self.curves[name]
            for suffix, means in (
                ("", curve.mean()),
                ("_last_half", curve.mean(0.5)),
                ("_window", curve.windowed()),
            ):
                found |= {f"{prefix}{figure}{suffix}": value for figure, value in means.items()}
        return found

    def state(self) -> State:
        """Tensors and plain data that `load` takes."""
        return {name: curve.state() for name, curve in self.curves.items()}

    def load(self, state: State) -> None:
        """Become the metrics whose `state` this is."""
        for name, curve in self.curves.items():
            curve.load(state[name])
