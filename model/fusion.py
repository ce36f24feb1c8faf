"""One score out of several: the family's, what is clicked together, and popularity, by weights that are learned online.

A linear softmax over features, its weights moved by Adagrad after every learned event. The counting features are
log(1 + value / ε): 0 for most items, so a user's score differs from the family's only where its last clicks have
neighbours. What is counted is the recency-weighted co-occurrence of item-kNN (Ludewig & Jannach 2018).
"""

from typing import NamedTuple

import numpy as np
import torch

from model.batch import Bool, Float32, Float64, Int32, Int64
from model.config import ModelConfig
from model.cooccurrence import Cooccurrence
from model.kernels import kernel
from model.popularity import Popularity
from model.state import State

PAIR_FEATURES = ("together", "followed", "followed the last", "together at any age")
ITEM_FEATURES = ("age", "clicks", "popular", "popular of late")
STEADY = 2  # item features, the first ones, that change little while an item is not clicked
FEATURES = ("family", *PAIR_FEATURES, *ITEM_FEATURES)
HISTORY_LENGTHS = (0, 1, 5, 20)  # where the groups begin that have weights of their own, added to everyone's
OF_ITEM = slice(1 + len(PAIR_FEATURES), None)  # the item features, among all
EVERYONE = len(HISTORY_LENGTHS)  # row of the weights that all histories share
SHORT_HALF_LIFE = 0.1  # of "popular of late", by that of "popular"

_P = len(PAIR_FEATURES)
_EPSILON = np.array([1e-3, 1e-3, 1e-4, 1e-3], np.float32)  # (P,)
NEAR = 20  # newest clicks of a history whose neighbours count
_FADE = 0.8  # of a click's weight in a history, by click
_OWN_POWER, _OTHER_POWER = 0.7, 0.3  # of the clicks that pairs are divided by: of the history's item, of the candidate
_SHRINKAGE = 5.0  # clicks added to those that pairs are divided by, so that rare items do not come first
_RATE = 0.1  # Adagrad's
_NEVER = -1e30  # a score below all others; compiled with fastmath, infinity is not safe


@kernel(fastmath=True)
def _sums(
    history: Int32, shares: Float32, clicks: Float32, start: Int64, size: Int32, keys: Int32, weights: Float32,
    sums: Float32, touched: Int32,
) -> int:  # fmt: skip
    """Add up the neighbours of one history (L,) in `sums` (rows, P), which is all 0; how many were `touched`."""
    count, fade = 0, np.float32(1.0)
    for k in range(min(NEAR, history.shape[0])):
        y = history[k]
        if y > 0:
            share, last = shares[y, 0], np.float32(k == 0) / (clicks[y] + np.float32(1.0))
            for p in range(start[y], start[y] + size[y]):
                j = keys[p]
                if j == 0:
                    continue
                if sums[j, 3] == 0.0:
                    touched[count] = j
                    count += 1
                after = weights[p, 0] * share
                both = after + weights[p, 1] * share
                sums[j, 0] += fade * both
                sums[j, 1] += fade * after
                sums[j, 2] += last * weights[p, 0]
                sums[j, 3] += both
        fade *= np.float32(_FADE)
    return count


@kernel(fastmath=True)
def _features(items: Int32, shares: Float32, epsilon: Float32, sums: Float32, out: Float32, bits: Int32) -> None:
    """The pair features (P, n) of `items` (n,), from their sums; bits: the same memory as `out`.

    The logarithm is a polynomial of the mantissa, good to 1e-4: the compiler takes many at once.
    """
    count = items.shape[0]
    for f in range(_P):
        for i in range(count):
            j = items[i]
            out[f, i] = np.float32(1.0) + sums[j, f] * (shares[j, 1] if f != 2 else np.float32(1.0)) / epsilon[f]
        for i in range(count):
            exponent = np.float32((bits[f, i] >> 23) - 127)
            bits[f, i] = (bits[f, i] & 0x7FFFFF) | 0x3F800000  # the mantissa, from 1 to 2
            m = out[f, i] - np.float32(1.0)
            tail = np.float32(0.3211881) - np.float32(0.0821303) * m
            tail = m * (np.float32(1.4387256) + m * (np.float32(-0.6777834) + m * tail))
            out[f, i] = np.float32(0.6931472) * (exponent + tail)


@kernel(fastmath=True)
def _add_pairs(
    scores: Float32, history: Int32, by_user: Float32, shares: Float32, clicks: Float32, start: Int64, size: Int32,
    keys: Int32, weights: Float32, epsilon: Float32, sums: Float32, touched: Int32, out: Float32,
) -> None:  # fmt: skip
    """Add the weighted pair features to `scores` (B, rows); by_user (B, P): their weights."""
    bits = out.view(np.int32)
    for n in range(scores.shape[0]):
        count = _sums(history[n], shares, clicks, start, size, keys, weights, sums, touched)
        _features(touched[:count], shares, epsilon, sums, out, bits)
        for i in range(count):
            j = touched[i]
            score = np.float32(0.0)
            for f in range(_P):
                score += by_user[n, f] * out[f, i]
                sums[j, f] = 0.0
            scores[n, j] += score


@kernel(fastmath=True)
def _learn(
    candidates: Int32, log_q: Float32, blocked: Bool, family: Float32, groups: Int64, of_item: Float32,
    w: Float64, squares: Float64, history: Int32, shares: Float32, clicks: Float32, start: Int64, size: Int32,
    keys: Int32, weights: Float32, epsilon: Float32, sums: Float32, touched: Int32, out: Float32,
) -> None:  # fmt: skip
    """One Adagrad step an event: candidates (B, C), the event's own item first, with their family scores (B, C)."""
    events, count = candidates.shape
    features = w.shape[1]
    x, z, mean = np.zeros((count, features), np.float32), np.empty(count, np.float32), np.empty(features, np.float64)
    bits = out.view(np.int32)
    for n in range(events):
        near = _sums(history[n], shares, clicks, start, size, keys, weights, sums, touched)
        _features(candidates[n], shares, epsilon, sums, out, bits)
        for i in range(near):
            sums[touched[i]] = 0.0
        own = w[EVERYONE] + w[groups[n]]
        largest = _NEVER
        for c in range(count):
            x[c, 0] = family[n, c]
            x[c, 1 : 1 + _P] = out[:, c]
            x[c, 1 + _P :] = of_item[candidates[n, c]]
            score = -log_q[n, c]
            for f in range(features):
                score += own[f] * x[c, f]
            z[c] = _NEVER if blocked[n, c] else score
            largest = max(largest, z[c])
        total = 0.0
        mean[:] = 0.0
        for c in range(count):
            if not blocked[n, c]:
                share = np.exp(z[c] - largest)
                total += share
                for f in range(features):
                    mean[f] += share * x[c, f]
        for f in range(features):
            gradient = mean[f] / total - x[0, f]
            if not abs(gradient) < 1e6:
                break  # scores that are not finite teach nothing
            for g in (EVERYONE, groups[n]):
                squares[g, f] += gradient * gradient
                w[g, f] -= _RATE * gradient / np.sqrt(squares[g, f])


class _Room(NamedTuple):
    """Where the kernels work; made once, since all of it is as long as the item tables."""

    sums: Float32  # (rows, P), all 0 between calls
    touched: Int32  # (rows,)
    out: Float32  # (P, rows or candidates)

    @classmethod
    def of(cls, rows: int, candidates: int) -> "_Room":
        width = max(rows, candidates)
        return cls(np.zeros((rows, _P), np.float32), np.empty(rows, np.int32), np.empty((_P, width), np.float32))


class Fusion:
    """The counts behind the features, and their weights. All of it moves when a mini-batch is learned, a few events at
    a time."""

    def __init__(self, config: ModelConfig) -> None:
        self.pairs = Cooccurrence(config.neighbours)
        self.recent = Popularity(max(1, round(config.popularity_half_life * SHORT_HALF_LIFE)))
        self.weights = np.zeros((EVERYONE + 1, len(FEATURES)))  # (groups + 1, F) float64
        self.weights[EVERYONE, 0] = 1.0
        self._squares = np.ones_like(self.weights)  # Adagrad's accumulators
        self._clicks = np.zeros(1024, np.float32)  # by item row
        self.of_item = np.zeros((1, len(ITEM_FEATURES)), np.float32)  # (rows, I) as of the last `refresh`
        self._shares = np.zeros((1, 2), np.float32)  # (rows, 2) what pairs are divided by, as of the last `refresh`
        self._room = _Room.of(1024, 1 + config.negatives)

    def grow(self, rows: int) -> None:
        """Hold at least `rows` item rows."""
        self.pairs.grow(rows)
        self.recent.grow(rows)
        if rows > len(self._clicks):
            size = max(rows, 2 * len(self._clicks))
            self._clicks = np.concatenate([self._clicks, np.zeros(size - len(self._clicks), np.float32)])

    def refresh(self, popular: Float64, first_seen: Int64, now: int, items: Int32 | None = None) -> None:
        """Make the item features anew, for the event with number `now`: of all items, or of `items` (n,) alone.

        popular (rows,): decayed clicks. first_seen (rows,): number of the event an item appeared with.
        """
        count = len(popular)
        rows = slice(0, count) if items is None else items
        if items is None:
            self.of_item = np.empty((count, len(ITEM_FEATURES)), np.float32)
            self._shares = np.empty((count, 2), np.float32)
            if count > len(self._room.touched):
                self._room = _Room.of(2 * count, self._room.out.shape[1])
        clicks = self._clicks[:count][rows]
        age = np.maximum(now - first_seen[rows], 1)  # of one that has not appeared: 1
        self.of_item[rows, 0] = 0.3 * np.log(age)
        self.of_item[rows, 1] = np.log1p(clicks)
        self.of_item[rows, 2] = np.log(popular[rows] + 0.1)
        self.of_item[rows, 3] = np.log(self.recent.counts(count, now)[rows] + 0.01)
        clicks = clicks + _SHRINKAGE
        self._shares[rows, 0], self._shares[rows, 1] = clicks**-_OWN_POWER, clicks**-_OTHER_POWER

    def by_user(self, history: Int32) -> Float32:
        """The weights (B, F) that hold for histories (B, L)."""
        weights: Float32 = (self.weights[EVERYONE] + self.weights[_groups(history)]).astype(np.float32)
        return weights

    def scores(self, family: Float32, history: Int32) -> Float32:
        """The fused scores (B, rows), from the family's, which are written over; by the last `refresh`."""
        by_user = self.by_user(history)
        family *= by_user[:, :1]
        family += by_user[:, OF_ITEM] @ self.of_item.T
        pairs = np.ascontiguousarray(by_user[:, 1 : 1 + _P])
        _add_pairs(family, history, pairs, *self._table(), _EPSILON, *self._room)
        return family

    def learn(self, candidates: Int32, log_q: Float32, blocked: Bool, family: Float32, history: Int32) -> None:
        """Move the weights by one step for each event, in order; by the last `refresh`.

        candidates (B, C): item rows, the event's own first and then sampled negatives; blocked (B, C): those that are
        none. log_q (B, C): log of how often each is expected among the draws. family (B, C): the family's scores.
        """
        _learn(
            candidates, log_q, blocked, family, _groups(history), self.of_item, self.weights, self._squares,
            history, *self._table(), _EPSILON, *self._room,
        )  # fmt: skip

    def count(self, items: Int32, history: Int32, sequence: Int64) -> None:
        """Count clicks on `items` (n,) after histories (n, L), by the numbers (n,) of the events."""
        self.pairs.add(items, history)
        self.recent.add(items, sequence)
        np.add.at(self._clicks, items, items > 0)

    def forget(self, items: Int32, rows: int) -> None:
        """Take evicted `items` out of the first `rows` rows."""
        self.pairs.forget(items, rows)
        self.recent.forget(items)
        self._clicks[items] = 0.0

    def state(self, rows: int) -> State:
        """Tensors and plain data that `load` takes, for the first `rows` item rows."""
        return {
            "pairs": self.pairs.state(rows),
            "recent": self.recent.state(rows),
            "clicks": torch.from_numpy(self._clicks[:rows].copy()),
            "weights": torch.from_numpy(self.weights.copy()),
            "squares": torch.from_numpy(self._squares.copy()),
        }

    def load(self, state: State) -> None:
        """Become the fusion whose `state` this is."""
        self.pairs.load(state["pairs"])
        self.recent.load(state["recent"])
        self._clicks, self.weights, self._squares = (state[n].numpy().copy() for n in ("clicks", "weights", "squares"))
        self.grow(1024)

    def _table(self) -> tuple[Float32, Float32, Int64, Int32, Int32, Float32]:
        return self._shares, self._clicks, self.pairs.start, self.pairs.size, self.pairs.keys, self.pairs.weights


def _groups(history: Int32) -> Int64:
    """The group of weights (B,) of histories (B, L)."""
    lengths = (history > 0).sum(1)
    groups: Int64 = np.searchsorted(HISTORY_LENGTHS, lengths, side="right") - 1
    return groups
