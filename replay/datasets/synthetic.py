"""A made-up stream of any size with a planted answer: who likes what is known, so recovery can be checked.

Every user has a taste for one cluster of items. Most clicks go to that cluster, to its popular items more
often (Zipf); the rest go anywhere. Users and items appear while the stream runs; tastes may change once.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from replay.datasets.base import DatasetError, Interaction, Item

Ints = NDArray[np.int64]
_BLOCK = 65_536  # events drawn at once
_START_MS = 1_704_067_200_000  # 2024-01-01 UTC
_SPAN_MS = 365 * 86_400_000  # so that the longest stream, too, lies in the past
_REDRAWS = 16
_MAX_SEEN_SLOTS = 1 << 26
_SHARES = ("repeats", "focus", "present")


@dataclass(frozen=True)
class Synthetic:
    """The stream and its planted answer. The same arguments give the same stream."""

    n_events: int = 100_000
    n_users: int = 2_000
    n_items: int = 2_000
    n_clusters: int = 10
    seed: int = 0
    drift_at: int | tuple[int, ...] | None = None  # from this event on every user has another taste; of several
    # numbers each is for a group of its own: user u is in group u modulo their count
    repeats: float = 0.0  # share of the clicks that go to the user's last item again
    focus: float = 0.9  # share of the clicks that go to the user's own cluster
    zipf: float = 1.0  # an item's popularity in its cluster is 1 / rank^zipf
    session: float = 8.0  # mean number of clicks that a user makes in a row
    present: float = 0.5  # share of users and items that are there from the beginning
    interval_s: float = 1.0  # between two events; less where the stream would be longer than a year
    mode: Literal["sessions", "uniform"] = "sessions"  # uniform: each click is by any user
    name: str = "synthetic"

    def __post_init__(self) -> None:
        self._require(min(self.n_events, self.n_users, self.n_clusters) >= 1, "sizes are at least 1")
        self._require(self.n_items >= self.n_clusters, "there are at least as many items as clusters")
        self._require(self.drift_at != (), "a drift needs a moment")
        self._require(self.interval_s > 0, "interval_s is above 0")
        self._require(self.session >= 1 and self.zipf >= 0, "session is at least 1, zipf at least 0")
        self._require(self.drift_at is None or self.n_clusters > 1, "a drift needs two clusters")
        for share in _SHARES:
            self._require(0 <= getattr(self, share) <= 1, f"{share} is from 0 to 1")

    def _require(self, right: bool, rule: str) -> None:
        if not right:
            raise DatasetError(f"synthetic stream: {rule}")

    def __len__(self) -> int:
        return self.n_events

    @cached_property
    def item_clusters(self) -> Ints:
        """(n_items,) The cluster of each item. The first items are one of each."""
        rng = np.random.default_rng([self.seed, 1])
        drawn = rng.integers(0, self.n_clusters, self.n_items)
        drawn[: self.n_clusters] = rng.permutation(self.n_clusters)
        return drawn

    @cached_property
    def user_clusters(self) -> Ints:
        """(n_users,) The taste of each user, before `drift_at`."""
        return np.random.default_rng([self.seed, 2]).integers(0, self.n_clusters, self.n_users)

    @cached_property
    def drifted_user_clusters(self) -> Ints:
        """(n_users,) The taste of each user from `drift_at` on: never the one before."""
        step = np.random.default_rng([self.seed, 3]).integers(1, max(2, self.n_clusters), self.n_users)
        return (self.user_clusters + step) % self.n_clusters

    def cluster_of_item(self, item_id: str) -> int:
        return int(self.item_clusters[int(item_id[1:])])

    def cluster_of_user(self, user_id: str, index: int = 0) -> int:
        """The taste of a user at event `index`."""
        return int(self.tastes(np.array([int(user_id[1:])]), np.array([index]))[0])

    def tastes(self, users: Ints, indexes: Ints) -> Ints:
        """(b,) The cluster that each of `users` likes at each of `indexes`."""
        if self.drift_at is None:
            return self.user_clusters[users]
        moments = np.atleast_1d(np.array(self.drift_at))
        return np.where(
            indexes >= moments[users % len(moments)], self.drifted_user_clusters[users], self.user_clusters[users]
        )

    def items(self) -> Sequence[Item]:
        clusters = self.item_clusters.tolist()
        return [
            Item(f"i{item}", f"Item {item} of cluster {cluster}", {"genres": [f"cluster {cluster}"]})
            for item, cluster in enumerate(clusters)
        ]

    def _times_ms(self, indexes: Ints) -> Ints:
        return _START_MS + (indexes * min(1000.0 * self.interval_s, _SPAN_MS / self.n_events)).astype(np.int64)

    def index_at(self, timestamp_ms: int) -> int:
        def time_ms(index: int) -> int:
            return int(self._times_ms(np.array([index]))[0])

        return bisect_left(range(self.n_events), timestamp_ms, key=time_ms)

    def interactions(self, start: int = 0) -> Iterator[Interaction]:
        """Events from number `start` on; those before it are drawn too, for the state that they leave."""
        for indexes, users, items in _Draws(self).blocks():
            rows = indexes >= start
            columns = users[rows].tolist(), items[rows].tolist(), self._times_ms(indexes[rows]).tolist()
            for user, item, time_ms in zip(*columns, strict=True):
                yield Interaction(f"u{user}", f"i{item}", time_ms)


class _Draws:
    """Draws a stream block by block; keeps what later blocks depend on."""

    def __init__(self, stream: Synthetic) -> None:
        self._stream = stream
        self._rng = np.random.default_rng([stream.seed, 0])
        self._catalogue = _Catalogue(stream)
        self._last_items = np.full(stream.n_users, -1)  # (n_users,)
        # who has clicked what, by hash: a collision only means that an item is drawn again
        slots = min(_MAX_SEEN_SLOTS, 1 << (16 * stream.n_events).bit_length())
        self._seen = np.zeros(slots, bool)

    def blocks(self) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Event numbers, users and items, each (b,)."""
        n_events = self._stream.n_events
        for first in range(0, n_events, _BLOCK):
            indexes = np.arange(first, min(first + _BLOCK, n_events))
            users = self._users(indexes)
            yield indexes, users, self._items(indexes, users)

    def _users(self, indexes: Ints) -> Ints:
        stream, b = self._stream, len(indexes)
        chosen = (self._rng.random(b) * _present(stream.n_users, stream.present, indexes, stream)).astype(int)
        if stream.mode == "uniform":
            return chosen
        lengths = self._rng.geometric(1 / stream.session, b)
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)[:b]
        # a user of a session is drawn among those present at its first click
        return chosen[starts]

    def _items(self, indexes: Ints, users: Ints) -> Ints:
        stream, b = self._stream, len(indexes)
        clusters = stream.tastes(users, indexes)
        anywhere = self._rng.random(b) >= stream.focus
        clusters = np.where(anywhere, self._rng.integers(0, stream.n_clusters, b), clusters)
        items = self._catalogue.draw(self._rng, clusters, indexes)
        again = self._not_new(users, items, np.arange(b))
        for turn in range(_REDRAWS):
            if turn >= _REDRAWS - 4:  # they have clicked most of what they like: anything else, then
                clusters[again] = self._rng.integers(0, stream.n_clusters, len(again))
            items[again] = self._catalogue.draw(self._rng, clusters[again], indexes[again])
            again = self._not_new(users, items, again)
        return self._repeated(users, items)

    def _not_new(self, users: Ints, items: Ints, rows: Ints) -> Ints:
        """Those of `rows` whose user has clicked the item before; the others are noted as clicked."""
        slots = self._slots(users[rows], items[rows])
        _, first = np.unique(slots, return_index=True)
        new = np.zeros(len(rows), bool)
        new[first] = ~self._seen[slots[first]]
        self._seen[slots[new]] = True
        return rows[~new]

    def _slots(self, users: Ints, items: Ints) -> NDArray[np.uint64]:
        pairs = (users * self._stream.n_items + items).astype(np.uint64)
        # Fibonacci hashing: the upper bits of a product with 2^64 / golden ratio
        mixed = pairs * np.uint64(0x9E3779B97F4A7C15)
        return mixed >> np.uint64(64 - (len(self._seen).bit_length() - 1))

    def _repeated(self, users: Ints, items: Ints) -> Ints:
        """`items` with a share of them replaced by the item that the user clicked before."""
        by_user = np.argsort(users, kind="stable")
        first = np.diff(users[by_user], prepend=-1) != 0
        last = self._last_items[users[by_user]]
        repeated = self._rng.random(len(items)) < self._stream.repeats
        repeated &= ~first | (last >= 0)
        chosen = np.where(first & repeated, last, items[by_user])
        kept = np.where(first | ~repeated, np.arange(len(items)), 0)
        result = np.empty_like(items)
        result[by_user] = chosen[np.maximum.accumulate(kept)]  # each row takes the newest that is kept
        self._last_items[users] = result  # of several the last one stays
        return result


class _Catalogue:
    """Items by cluster and appearance, with their popularity summed up, so that a draw is two searches."""

    def __init__(self, stream: Synthetic) -> None:
        self._stream = stream
        clusters = stream.item_clusters
        self._order = np.argsort(clusters, kind="stable")  # (n_items,) by cluster, then appearance
        self._keys = clusters[self._order] * stream.n_items + self._order
        weights = _zipf(clusters, stream)[self._order]
        self._sums = np.concatenate([[0.0], np.cumsum(weights)])  # (n_items + 1,)

    def draw(self, rng: np.random.Generator, clusters: Ints, indexes: Ints) -> Ints:
        """(b,) One item for each event, of its cluster, among those that have appeared by then."""
        stream = self._stream
        share = max(stream.present, stream.n_clusters / stream.n_items)  # one of each cluster at least
        present = _present(stream.n_items, share, indexes, stream)
        low = np.searchsorted(self._keys, clusters * stream.n_items)
        high = np.searchsorted(self._keys, clusters * stream.n_items + present)
        aims = self._sums[low] + rng.random(len(indexes)) * (self._sums[high] - self._sums[low])
        places = np.clip(np.searchsorted(self._sums, aims, side="right") - 1, low, high - 1)
        return np.asarray(self._order[places], np.int64)


def _zipf(clusters: Ints, stream: Synthetic) -> NDArray[np.float64]:
    """(n_items,) Popularity by a random rank inside the item's cluster."""
    shuffled = np.random.default_rng([stream.seed, 4]).permutation(stream.n_items)
    by_cluster = shuffled[np.argsort(clusters[shuffled], kind="stable")]
    starts = np.searchsorted(clusters[by_cluster], clusters[by_cluster])
    weights = np.empty(stream.n_items)
    weights[by_cluster] = 1.0 / (1 + np.arange(stream.n_items) - starts) ** stream.zipf
    return weights


def _present(count: int, share: float, indexes: Ints, stream: Synthetic) -> Ints:
    """(b,) How many of `count` have appeared by each event: `share` at first, evenly up to all."""
    grown = share + (1 - share) * indexes / stream.n_events
    present: Ints = np.maximum(1, np.ceil(count * grown)).astype(np.int64)
    return present
