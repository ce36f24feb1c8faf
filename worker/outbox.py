"""What is to be published, and when: touched users at once, moved items now and then, quiet users in the background.

Rows wait here, not vectors: a vector is made when the publisher has room for it, so an outage of Redis costs one flag
a row, and what is written afterwards is the newest.
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import compress, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import torch

from model.batch import Float32, Int32
from model.id_table import IdTable
from model.learner import OnlineLearner
from model.publishing import Best
from worker.catalogue import Catalogue
from worker.ingest import Taken
from worker.settings import PublishSettings
from worker.source import Partition, Positions
from worker.updates import Ack, Heartbeat, ItemVectors, Popular, Publishes, Removed, UserVectors

_ITEMS_AT_ONCE = _REMOVED_AT_ONCE = 10_000
_DESCRIBED_EVERY_S = 0.25  # a shop's item that is sold out must be gone within a second
_PARTS_KEPT = 1000  # polls whose users wait
_FORGOTTEN_KEPT = 10_000  # that are not known and wait for their removal, at most
_TIMES_KEPT = 1_000_000  # events whose acknowledgement is waited for, and counted in the freshness

Times = npt.NDArray[np.int64]
Figures = Callable[[], dict[str, str | int | float | None]]
_NO_ROWS = np.empty(0, np.int32)
_NO_TIMES = np.empty(0, np.int64)

log = structlog.get_logger(__name__)


def positions_json(positions: Positions) -> bytes:
    """{"topic": {"0": next offset to read}}, as published."""
    topics: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(positions.items()):
        topics.setdefault(topic, {})[str(partition)] = offset
    return json.dumps(topics).encode()


def positions_from_json(text: bytes) -> Positions:
    """The inverse of `positions_json`; nothing for an empty text."""
    topics = json.loads(text) if text else {}
    return {Partition(t, int(p)): offset for t, parts in topics.items() for p, offset in parts.items()}


def _json(external: str | None) -> bytes:
    return json.dumps(external, ensure_ascii=False).encode()


def _distinct(rows: Int32) -> Int32:
    """Each row once, in order of its first appearance."""
    return rows[np.sort(np.unique(rows, return_index=True)[1])]


@dataclass(slots=True)
class _Part:
    """Users that one poll was the first to touch, and Kafka's timestamps of all its events."""

    rows: Int32
    times_ms: Times


class TouchedUsers:
    """User rows in order of their first mark; each is in it once, whatever the number of marks."""

    def __init__(self) -> None:
        self._flags = np.zeros(1024, np.bool_)  # by row
        self._parts: deque[_Part] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def mark(self, rows: Int32, times_ms: Times) -> None:
        """Add the rows that are not in it yet."""
        if int(rows.max(initial=0)) >= len(self._flags):
            self._flags = np.concatenate([self._flags, np.zeros(int(rows.max()), np.bool_)])
        new = rows[~self._flags[rows]]
        distinct = _distinct(new)
        self._flags[distinct] = True
        self._count += len(distinct)
        self._parts.append(_Part(distinct, times_ms))
        self._join_parts()

    def take(self, count: int) -> tuple[Int32, Times]:
        """At most `count` rows, and the times of the polls whose users are all gone by then.

        An event whose user was marked before it is published with that mark: its time comes a little late.
        """
        rows, times = [_NO_ROWS], [_NO_TIMES]
        while self._parts and count >= len(self._parts[0].rows):
            part = self._parts.popleft()
            rows.append(part.rows)
            times.append(part.times_ms)
            count -= len(part.rows)
        if self._parts and count:
            rows.append(self._parts[0].rows[:count])
            self._parts[0].rows = self._parts[0].rows[count:]
        taken = np.concatenate(rows)
        self._flags[taken] = False
        self._count -= len(taken)
        return taken, np.concatenate(times)

    def drop(self, rows: Int32) -> None:
        """Take `rows` out, wherever they are."""
        known = rows[rows < len(self._flags)]
        if not self._flags[known].any():
            return
        self._flags[known] = False
        for part in self._parts:
            part.rows = part.rows[self._flags[part.rows]]
        self._count = sum(len(part.rows) for part in self._parts)

    def rows(self) -> Int32:
        """All rows, in order."""
        return np.concatenate([_NO_ROWS, *(part.rows for part in self._parts)])

    def _join_parts(self) -> None:
        """Bound what waits: many parts become one, which keeps the newest times."""
        if len(self._parts) > _PARTS_KEPT:
            times = np.concatenate([part.times_ms for part in self._parts])[-_TIMES_KEPT:]
            self._parts = deque([_Part(self.rows(), times)])


class RowSet:
    """A set of rows; rows of any number fit in."""

    def __init__(self) -> None:
        self._flags = np.zeros(1024, np.bool_)

    def add(self, rows: Int32) -> None:
        if int(rows.max(initial=0)) >= len(self._flags):
            self._flags = np.concatenate([self._flags, np.zeros(int(rows.max()), np.bool_)])
        self._flags[rows] = True

    @property
    def empty(self) -> bool:
        return not self._flags.any()

    def rows(self) -> Int32:
        """All of them, ascending."""
        return np.flatnonzero(self._flags).astype(np.int32)

    def take(self, rows: Int32) -> npt.NDArray[np.bool_]:
        """Which of `rows` (n,) were in it; they no longer are."""
        there = np.zeros(len(rows), np.bool_)
        known = rows < len(self._flags)
        there[known] = self._flags[rows[known]]
        self._flags[rows[known]] = False
        return there


class PublishedItems:
    """What Redis has of each item row: its vector (NaN = not at all) and its count of clicks."""

    def __init__(self) -> None:
        self._vectors: Float32 = np.empty((0, 0), np.float32)
        self._clicks = np.empty(0, np.int64)

    def changed(self, vectors: Float32, clicks: npt.NDArray[np.int64], tolerance: float) -> Int32:
        """Rows, ascending, that were clicked since, or moved by more than `tolerance` of the vector's length.

        vectors: (n, dim) and clicks: (n,) as they are now.
        """
        self._grow(vectors)
        moved = np.linalg.norm(vectors - self._vectors[: len(vectors)], axis=1)
        near = moved <= tolerance * np.linalg.norm(vectors, axis=1)  # False for NaN
        return np.flatnonzero(~near | (clicks != self._clicks[: len(clicks)])).astype(np.int32)

    def note(self, rows: Int32, vectors: Float32, clicks: npt.NDArray[np.int64]) -> None:
        """What `rows` have of the tables vectors (n, dim) and clicks (n,) has been handed over."""
        self._grow(vectors)
        self._vectors[rows], self._clicks[rows] = vectors[rows], clicks[rows]

    def forget(self, rows: Int32) -> None:
        """`rows` are not there any more."""
        self._vectors[rows[rows < len(self._vectors)]] = np.nan

    def clear(self) -> None:
        """Nothing is there any more."""
        self._vectors.fill(np.nan)

    def _grow(self, vectors: Float32) -> None:
        if (there := len(self._vectors)) < len(vectors):
            grown = np.full((max(2 * len(vectors), 1024), vectors.shape[1]), np.nan, np.float32)
            grown[:there] = self._vectors.reshape(there, vectors.shape[1])
            self._vectors, self._clicks = grown, np.concatenate([self._clicks, np.zeros(len(grown) - there, np.int64)])


class Outbox:
    """Between the learner and the publisher. `version` counts the publishing chunks over the model's whole life.

    After a start nothing is published until the worker has caught up with what readers have already seen; then what
    was touched goes first, everything else follows in the background, and at last what only older epochs wrote is
    swept away. An id that Redis never had need not be removed from it, so what waits for removal is bounded by the
    capacities, however long Redis is away.
    """

    def __init__(
        self,
        learner: OnlineLearner,
        publisher: Publishes,
        settings: PublishSettings,
        topics: Collection[str] = (),  # that are read: what readers have seen of others is no matter
        catalogue: Catalogue | None = None,  # what is published with the items
    ) -> None:
        self._learner, self._publisher, self._settings = learner, publisher, settings
        self._topics = frozenset(topics)
        self._catalogue = Catalogue(1) if catalogue is None else catalogue  # an empty one is false
        self.version = 0
        self.live = False  # caught up with what readers have seen: vectors are handed over
        self.users_published = self.items_published = 0
        self.items_backlog = 0  # moved items that are not handed over yet, as of the last round
        self.evicted: Counter[str] = Counter()  # by table, of this run
        self.removed = 0  # ids whose removal is acknowledged, of this run: a new checkpoint no longer names them
        self._users = TouchedUsers()
        self._rough = TouchedUsers()  # whose vectors went out unfitted, for want of time
        self._handed_over: deque[Int32] = deque()  # touched users by update that is not acknowledged, oldest first
        self._removed_users: dict[str, None] = {}
        self._removed_items: dict[str, None] = {}
        self._removing: Removed | None = None  # handed over, not acknowledged
        self._users_in_redis, self._items_in_redis = RowSet(), RowSet()  # or maybe
        self._texts: list[bytes] = []  # by item row: its id as JSON
        self._stale_texts: set[int] = set()
        self._published_items = PublishedItems()
        self._described = RowSet()  # items of which something else is known than what was handed over
        self._described_due_s = float("-inf")
        self._items_due_s = self._heartbeat_due_s = float("-inf")
        self._quiet_row = 1  # next user row of the background round
        self._quiet_allowance = 0.0
        self._turned_s: float | None = None
        self._round_from = 0  # the first version of the newest round of everything
        self._left_to_round: set[str] = set()  # of "users" and "items": not all published yet since going live

    @property
    def backlog(self) -> int:
        """Users whose new vector is not in Redis yet."""
        return len(self._users) + sum(map(len, self._handed_over))

    def mark(self, taken: Taken) -> None:
        """Note what a poll changed: touched users, evicted ids, events whose freshness is to be measured."""
        for rows, ids in taken.observed.evicted_users:
            self._users.drop(rows)
            self._rough.drop(rows)
            self._removed_users.update(_chosen(ids, self._users_in_redis.take(rows)))
            self.evicted["users"] += 0 if taken.forgotten else len(ids)
        # Of a user that the model does not know an older worker may have left a key. Past the limit the sweep gets it.
        if taken.forgotten and len(self._removed_users) < _FORGOTTEN_KEPT:
            self._removed_users[taken.forgotten] = None
        for rows, ids in taken.observed.evicted_items:
            self._published_items.forget(rows)
            self._described.take(rows)
            self._stale_texts.update(rows.tolist())
            self._removed_items.update(_chosen(ids, self._items_in_redis.take(rows)))
            self.evicted["items"] += len(ids)
        if taken.described:
            rows = self._learner.items.lookup(taken.described)
            self._described.add(rows[rows > 0])
        if len(touched := taken.observed.touched):
            self._users.mark(touched[self._learner.users_live(touched)], taken.record_times_ms)

    def turn(self, now_s: float, now_ms: int, positions: Positions, figures: Figures, ended: bool) -> None:
        """Hand over whatever there is room for. In this order: acknowledgements, losses, users, items, heartbeat.

        ended: the source has nothing more to read now.
        """
        for ack in self._publisher.acknowledged():
            self._take_ack(ack)
        if self._publisher.take_loss():
            self._publish_everything_again()
        if not self.live and self._caught_up(positions, ended):
            self._go_live()
        if self.live:
            self._hand_over_users(now_s, now_ms, positions)
            self._hand_over_removed()
            if now_s >= self._described_due_s and self._hand_over_described(now_ms):
                self._described_due_s = now_s + _DESCRIBED_EVERY_S
            if now_s >= self._items_due_s and self._hand_over_items(now_ms):
                self._items_due_s = now_s + self._settings.item_interval_s
                self._round_done("items")
        if now_s >= self._heartbeat_due_s and self._publisher.ready_for(Heartbeat):
            self._publisher.submit(Heartbeat(figures()))
            self._heartbeat_due_s = now_s + self._settings.heartbeat_s

    def hurry(self) -> None:
        """Items and the heartbeat are due at once: the worker is about to stop."""
        self._described_due_s = self._items_due_s = self._heartbeat_due_s = float("-inf")

    @property
    def settled(self) -> bool:
        """Every touched user, and after `hurry` every moved item, has been handed over."""
        due = float("-inf") in (self._items_due_s, self._heartbeat_due_s)
        removed = self._removed_users or self._removed_items
        return self.live and self._described.empty and not (len(self._users) or len(self._rough) or removed or due)

    def state(self) -> dict[str, Any]:
        """Plain data that `load` takes: what is still to be published or deleted, until it is acknowledged."""
        users = _distinct(np.concatenate([*self._handed_over, self._users.rows(), self._rough.rows()]))
        removing = self._removing or Removed([], [], 0)
        return {
            "version": self.version,
            "users": torch.from_numpy(users[self._learner.users_live(users)]),
            "removed_users": [*removing.users, *self._removed_users],
            "removed_items": [*removing.items, *self._removed_items],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.version = state["version"]
        self._users.mark(state["users"].numpy(), _NO_TIMES)
        self._removed_users = dict.fromkeys(state["removed_users"])
        self._removed_items = dict.fromkeys(state["removed_items"])
        self._users_in_redis.add(_live(self._learner.users))
        self._items_in_redis.add(_live(self._learner.items))

    # --- inside --------------------------------------------------------------------------------------------

    def _caught_up(self, positions: Positions, ended: bool) -> bool:
        seen = self._publisher.seen_positions
        if seen is None:
            return False
        ours = {at: offset for at, offset in positions_from_json(seen).items() if at.topic in self._topics}
        # A partition that is not found yet is behind. At the end of the stream there is nothing to catch up with.
        return ended or all(positions.get(at, -1) >= offset for at, offset in ours.items())

    def _go_live(self) -> None:
        self.live = True
        self._publish_everything_again()
        log.info("publishing", epoch=self._publisher.epoch, users=len(self._learner.users))

    def _publish_everything_again(self) -> None:
        self._published_items.clear()
        self._quiet_row, self._left_to_round, self._round_from = 1, {"users", "items"}, self.version + 1
        self._items_due_s = float("-inf")

    def _hand_over_users(self, now_s: float, now_ms: int, positions: Positions) -> None:
        if not self._publisher.ready_for(UserVectors):
            return
        touched, times = self._users.take(self._settings.max_users)
        room = self._settings.max_users - len(touched)
        self._rough.drop(touched)
        rough, _ = self._rough.take(min(room, max(0, self._settings.fitted_at_once - len(touched))))
        quiet = self._quiet_rows(now_s, room - len(rough))
        fitted = np.concatenate([quiet, rough, touched[: self._settings.fitted_at_once]])
        unfitted = touched[self._settings.fitted_at_once :]
        if len(fitted):
            self._submit_users(fitted, unfitted, times, now_ms, positions)
            self._handed_over.append(np.concatenate([rough, touched]))
        if self._quiet_row >= self._learner.users.rows:
            self._quiet_row = 1
            self._round_done("users")

    def _submit_users(self, fitted: Int32, unfitted: Int32, times: Times, now_ms: int, positions: Positions) -> None:
        self.version += 1
        rows = np.concatenate([fitted, unfitted])
        self._users_in_redis.add(rows)
        self._rough.mark(unfitted, _NO_TIMES)
        vectors, best = self._learner.refreshed(
            fitted, self._settings.top, self._unavailable(), self._settings.diversity
        )
        vectors = np.concatenate([vectors, self._learner.rough_vectors(unfitted)])
        self._publisher.submit(
            UserVectors(
                ids=self._learner.user_ids(rows),
                vectors=vectors,
                recent=self._recent(rows),
                top=self._top(best),
                events=self._learner.log.count[rows],
                version=self.version,
                updated_ms=now_ms,
                positions=positions_json(positions),
                event_times_ms=times,
            )
        )

    def _unavailable(self) -> npt.NDArray[np.bool_]:
        """Item rows (rows,) that are not to be recommended."""
        flags = np.zeros(self._learner.items.rows, np.bool_)
        flags[self._learner.items.lookup(list(self._catalogue.unavailable))] = True
        return flags

    def _top(self, best: Best) -> list[bytes]:
        """JSON lists of the best items' ids and scores, best first."""
        if not self._settings.top:
            return []
        texts = self._item_texts()
        return [
            b"[" + b",".join(b"[%b,%.6g]" % (texts[i], s) for i, s in zip(items, scores, strict=True) if i) + b"]"
            for items, scores in zip(best.items.tolist(), best.scores.tolist(), strict=True)
        ]

    def _recent(self, rows: Int32) -> list[bytes]:
        """JSON lists of the newest item ids, newest first."""
        texts = self._item_texts()
        windows = self._learner.log.newest(rows, self._settings.recent_items)
        lengths = (windows > 0).sum(1).tolist()
        return [
            b"[" + b",".join([texts[item] for item in window[:n]]) + b"]"
            for window, n in zip(windows.tolist(), lengths, strict=True)
        ]

    def _item_texts(self) -> list[bytes]:
        ids = self._learner.items.ids
        for row in self._stale_texts:
            if row < len(self._texts):
                self._texts[row] = _json(ids[row])
        self._stale_texts = {row for row in self._stale_texts if ids[row] is None}  # not handed out again yet
        self._texts += [_json(external) for external in ids[len(self._texts) :]]
        return self._texts

    def _quiet_rows(self, now_s: float, room: int) -> Int32:
        """The next users of the background round, within its rate; `room` is what fits beside the touched ones."""
        passed = now_s - (self._turned_s if self._turned_s is not None else now_s)
        self._turned_s = now_s
        rate, end = self._settings.background_per_s, self._learner.users.rows
        self._quiet_allowance = min(self._quiet_allowance + passed * rate, float(rate))
        stop = min(self._quiet_row + min(room, int(self._quiet_allowance)), end)
        rows = np.arange(self._quiet_row, stop, dtype=np.int32)
        self._quiet_allowance -= len(rows)
        self._quiet_row = stop
        return rows[self._learner.users_live(rows)]

    def _round_done(self, kind: str) -> None:
        """Everything of this kind is published again; once all is, what was not written by then goes.

        That is what older epochs wrote, and what came back when Redis went back to an older state of its own.
        """
        if kind in self._left_to_round:
            self._left_to_round.discard(kind)
            if not self._left_to_round:
                self._publisher.sweep(self._round_from)

    def _hand_over_removed(self) -> None:
        if not (self._removed_users or self._removed_items) or not self._publisher.ready_for(Removed):
            return
        self.version += 1
        self._removing = Removed(
            _taken(self._removed_users, self._learner.users, self._users_in_redis),
            _taken(self._removed_items, self._learner.items, self._items_in_redis),
            self.version,
        )
        self._publisher.submit(self._removing)

    def _hand_over_described(self, now_ms: int) -> bool:
        """Items of which something else is known, wherever their vectors are; True when some were handed over."""
        ready = self._publisher.ready_for(ItemVectors) and self._publisher.ready_for(Popular)
        if self._described.empty or not ready:
            return False
        rows = self._described.rows()[:_ITEMS_AT_ONCE]
        vectors = self._learner.item_vectors()
        self._submit_items(rows, vectors, self._learner.sampler.clicks, now_ms)
        self._publisher.submit(self._popular())
        return True

    def _submit_items(self, rows: Int32, vectors: Float32, clicks: npt.NDArray[np.int64], now_ms: int) -> None:
        """Hand item `rows` over, whose vectors and clicks are rows of the tables given."""
        self.version += 1
        self._items_in_redis.add(rows)
        self._described.take(rows)
        ids = self._learner.item_ids(rows)
        columns = self._catalogue.columns(ids)
        self._publisher.submit(ItemVectors(ids, vectors[rows], clicks[rows], self.version, now_ms, *columns))
        self._published_items.note(rows, vectors, clicks)

    def _hand_over_items(self, now_ms: int) -> bool:
        """Items that changed, and the popularity list; True when that was all of them."""
        if not (self._publisher.ready_for(ItemVectors) and self._publisher.ready_for(Popular)):
            return False
        vectors = self._learner.item_vectors()
        clicks = self._learner.sampler.clicks[: len(vectors)]
        rows = self._published_items.changed(vectors, clicks, self._settings.item_tolerance)
        rows = rows[self._learner.items_live(rows)]
        part = rows[:_ITEMS_AT_ONCE]
        if len(part):
            self._submit_items(part, vectors, clicks, now_ms)
        self._publisher.submit(self._popular())
        self.items_backlog = len(rows) - len(part)
        return not self.items_backlog

    def _popular(self) -> Popular:
        counts = self._learner.popularity.counts(self._learner.items.rows)
        counts[self._unavailable()] = 0
        count = min(self._settings.popular, int((counts > 0).sum()))
        rows = np.argsort(-counts, kind="stable")[:count].astype(np.int32)
        return Popular(self._learner.item_ids(rows), counts[rows])

    def _take_ack(self, ack: Ack) -> None:
        if isinstance(ack.update, UserVectors):
            self._handed_over.popleft()
            self.users_published += len(ack.update.ids) - ack.refused - ack.skipped
        elif isinstance(ack.update, ItemVectors):
            self.items_published += len(ack.update.ids) - ack.refused - ack.skipped
        elif isinstance(ack.update, Removed):
            self._removing = None
            self.removed += len(ack.update.users) + len(ack.update.items)


def _chosen(ids: list[str], flags: npt.NDArray[np.bool_]) -> dict[str, None]:
    return dict.fromkeys(compress(ids, flags))


def _live(table: IdTable) -> Int32:
    return np.flatnonzero(table.last_used[: table.rows]).astype(np.int32)


def _taken(removed: dict[str, None], table: IdTable, in_redis: RowSet) -> list[str]:
    """The next ids to remove, out of `removed`. One that has come back is published again, or was: it must stay."""
    ids = list(islice(removed, _REMOVED_AT_ONCE))
    for external in ids:
        del removed[external]
    rows = table.lookup(ids)
    in_redis.add(rows[rows > 0])
    return list(_chosen(ids, rows == 0))
