"""What a peer is, and the protocol that it goes through: rank each event, then learn it, one after the other."""

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from model.batch import Float64, Int32, Int64
from model.kernels import kernel
from model.metrics import K
from worker.evaluate.measures import Measures
from worker.evaluate.rows import Advance, Row
from worker.evaluate.stream import EventStream

_BLOCK = 512


class Peer(Protocol):
    """Scores items for a user, and learns a click at a time."""

    name: str
    settings: dict[str, Any]

    def score(self, user: int, clicked: Int32, scores: Float64) -> None:
        """Fill scores (n,) of the first n items for a user that has clicked items `clicked`, oldest first."""
        ...

    def learn(self, user: int, clicked: Int32, item: int) -> None:
        """Learn that a user, after `clicked`, clicked an item."""
        ...


@kernel
def ranked(scores: Float64, clicked: Int32, item: int, top: Int32) -> int:
    """0-based rank of `item` among the items that are scored and not clicked, -1 = a miss; fills `top` (K,).

    Items are numbered in order of appearance, so of two with the same score the smaller number goes first. A score
    that is no number is none: a model that has diverged must not win.
    """
    for i in range(clicked.shape[0]):
        scores[clicked[i]] = -np.inf
    for j in range(scores.shape[0]):
        if not np.isfinite(scores[j]):
            scores[j] = -np.inf
    top[:] = -1
    worst = -np.inf  # the score that an item needs, to enter the list
    for j in range(scores.shape[0]):
        if scores[j] > worst:
            k = K - 1
            while k > 0 and (top[k - 1] < 0 or scores[top[k - 1]] < scores[j]):
                top[k] = top[k - 1]
                k -= 1
            top[k] = j
            worst = -np.inf if top[K - 1] < 0 else scores[top[K - 1]]
    if item >= scores.shape[0] or scores[item] == -np.inf:
        return -1
    above = 0
    for j in range(scores.shape[0]):
        above += scores[j] > scores[item] or (scores[j] == scores[item] and j < item)
    return above


class Clicks:
    """Each user's clicks, oldest first."""

    def __init__(self, users: int) -> None:
        self._items = [np.empty(8, np.int32)] * users
        self._counts = [0] * users

    def of(self, user: int) -> Int32:
        """(n,) Items."""
        return self._items[user][: self._counts[user]]

    def add(self, user: int, item: int) -> None:
        """Append a click."""
        items, count = self._items[user], self._counts[user]
        if count in (0, len(items)):
            self._items[user] = items = np.concatenate([items[:count], np.empty(max(8, count), np.int32)])
        items[count] = item
        self._counts[user] += 1


def peer_row(make: Callable[[EventStream], Peer], stream: EventStream, advance: Advance) -> Row:
    """Take a peer through the stream; returns its row. What is compiled at its first use is compiled before."""
    small = stream.head(50)
    _passed(make(small), small, lambda _: None)
    peer = make(stream)
    measures, seconds = _passed(peer, stream, advance)
    return {
        "family": peer.name,
        "name": peer.name,
        "kind": "peer",
        "default": False,
        "seed": peer.settings.get("seed", 0),
        "settings": peer.settings,
        "seconds": seconds,
        "events_per_s": len(stream) / seconds,
        **measures.report(),
    }


def _passed(peer: Peer, stream: EventStream, advance: Advance) -> tuple[Measures, float]:
    """What was measured, and the seconds that the peer itself took."""
    measures, spent = Measures(stream), 0.0
    began = time.perf_counter()
    for numbers, ranks, top in _blocks(peer, stream):
        looked = time.perf_counter()
        measures.add(numbers, ranks, top)
        advance(int(numbers[-1]) + 1 if len(numbers) else 0)
        spent += time.perf_counter() - looked
    return measures, time.perf_counter() - began - spent


def _blocks(peer: Peer, stream: EventStream) -> Iterator[tuple[Int64, Int64, Int32]]:
    clicks, scores = Clicks(len(stream.user_ids)), np.zeros(len(stream.item_ids))
    appeared = 0  # items so far
    for first in range(0, len(stream), _BLOCK):
        last = min(first + _BLOCK, len(stream))
        ranks, top = np.full(last - first, -1), np.full((last - first, K), -1, np.int32)
        columns = (stream.users, stream.items, stream.positive, stream.observe)
        events = zip(*(column[first:last].tolist() for column in columns), strict=True)
        for n, (user, item, positive, observe) in enumerate(events):
            clicked = clicks.of(user)
            if positive:
                peer.score(user, clicked, scores[:appeared])
                ranks[n] = ranked(scores[:appeared], clicked, item, top[n])
                peer.learn(user, clicked, item)
            appeared = max(appeared, item + 1)
            if observe:
                clicks.add(user, item)
        chosen = np.flatnonzero(stream.positive[first:last])
        yield chosen + first, ranks[chosen], top[chosen]
