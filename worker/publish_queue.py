"""Updates between the loop and the publishing thread: bounded, in order, cut into calls."""

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from worker.redis_writer import RedisWriter
from worker.updates import Ack, Heartbeat, ItemVectors, Popular, Removed, Update, UserVectors

_ROWS_PER_CALL = 500  # of items and removals: less than of users, so that users never wait long behind one
# Handed over and not yet acknowledged, at most; a second batch of users waits while the first is written.
_OUTSTANDING: dict[type[Update], int] = {
    UserVectors: 2,
    ItemVectors: 1,
    Removed: 1,
    Popular: 1,
    Heartbeat: 1,
}
_HASH_BYTES = 100  # of a row's key and small fields, roughly


class PublishQueue:
    """What waits for Redis. Users and heartbeats take turns with everything else; each of the two is in order.
    A removal also waits for the users that were handed over before it.

    `next`, `sent` and `done` are the publishing thread's, the rest is the loop's.
    """

    def __init__(self, max_users: int) -> None:
        self._max_users = max_users
        self._changed = threading.Condition(threading.RLock())
        self._lanes: tuple[deque[Task], deque[Task]] = (deque(), deque())
        self._numbers: tuple[deque[int], deque[int]] = (deque(), deque())  # of the tasks, beside them
        self.added = 0  # updates over the queue's whole life
        self._turn = 0  # the lane that goes first
        self._again: Task | None = None  # a call that has not succeeded yet is made again before any other
        self._acks: list[Ack] = []
        self._outstanding: Counter[type[Update]] = Counter()

    def has_room(self, kind: type[Update]) -> bool:
        return self._outstanding[kind] < _OUTSTANDING[kind]

    def add(self, update: Update) -> None:
        lane = 0 if isinstance(update, UserVectors | Heartbeat) else 1
        with self._changed:
            self._outstanding[type(update)] += 1
            self.added += 1
            self._lanes[lane].append(task_of(update, self._max_users))
            self._numbers[lane].append(self.added)
            self._changed.notify_all()

    def collect(self) -> list[Ack]:
        """Acknowledgements since the last call, oldest first; makes room for new updates."""
        with self._changed:
            acks, self._acks = self._acks, []
            self._outstanding.subtract(type(ack.update) for ack in acks)
        return acks

    def rows(self) -> int:
        """Rows that wait."""
        with self._changed:
            return sum(len(task) for lane in self._lanes for task in lane)

    def all_done(self, count: int) -> bool:
        """Whether the first `count` updates that were ever added are done."""
        with self._changed:
            return all(numbers[0] > count for numbers in self._numbers if numbers)

    @property
    def empty(self) -> bool:
        return not any(self._lanes)

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Until `condition` holds, which is looked at after each change and each `wake`."""
        with self._changed:
            self._changed.wait_for(condition, timeout_s)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def next(self) -> "Task | None":
        """The task whose call is to be made now."""
        if self._again is None:
            with self._changed:
                lane = self._turn if self._may_go(self._turn) else 1 - self._turn
                self._again = self._lanes[lane][0] if self._lanes[lane] else None
        return self._again

    def _may_go(self, lane: int) -> bool:
        if not self._lanes[lane]:
            return False
        # An older write that is sent after the removal of its id would bring the id back.
        waits_for_older = isinstance(self._lanes[lane][0].update, Removed) and bool(self._lanes[1 - lane])
        return not (waits_for_older and self._numbers[1 - lane][0] < self._numbers[lane][0])

    def sent(self) -> None:
        """The call succeeded: the other lane's turn."""
        self._again, self._turn = None, 1 - self._turn

    def done(self, ack: Ack) -> None:
        """The whole of the update is in Redis."""
        with self._changed:
            lane = next(i for i, lane in enumerate(self._lanes) if lane and lane[0].update is ack.update)
            self._lanes[lane].popleft()
            self._numbers[lane].popleft()
            self._acks.append(ack)
            self._changed.notify_all()


class Task(Protocol):
    """One update. `send` makes one call and may be repeated after it raised."""

    update: Update
    done: bool
    refused: int  # rows whose keys are newer
    skipped: int  # rows that are not finite

    def send(self, writer: RedisWriter, call_bytes: int) -> None: ...

    def __len__(self) -> int:
        """Rows that are not sent yet."""
        ...

    @property
    def left_bytes(self) -> int:
        """Of those rows, roughly and at most."""
        ...


def task_of(update: Update, max_users: int) -> Task:
    """The task for an update; at most `max_users` users go into one call."""
    if isinstance(update, UserVectors | ItemVectors):
        return _VectorsTask(update, max_users if isinstance(update, UserVectors) else _ROWS_PER_CALL)
    if isinstance(update, Removed):
        return _RemovedTask(update)
    return _SingleTask(update)


class _VectorsTask:
    def __init__(self, update: UserVectors | ItemVectors, max_rows: int) -> None:
        self.update: Update = update
        self.done = False
        self.refused = self.skipped = 0
        self._vectors = update
        self._max_rows = max_rows
        self._rows: list[int] | None = None  # those that are finite
        self._sent = 0

    def __len__(self) -> int:
        return len(self._vectors.ids if self._rows is None else self._rows) - self._sent

    def send(self, writer: RedisWriter, call_bytes: int) -> None:
        if self._rows is None:
            self._rows = np.flatnonzero(np.isfinite(self._vectors.vectors).all(axis=1)).tolist()
            self.skipped = len(self._vectors.ids) - len(self._rows)
        length = max(1, min(self._max_rows, call_bytes // self._row_bytes()))
        rows = self._rows[self._sent : self._sent + length]
        if isinstance(self._vectors, UserVectors):
            self.refused += writer.users(self._vectors, rows, first=self._sent == 0)
        else:
            self.refused += writer.items(self._vectors, rows)
        self._sent += len(rows)
        self.done = self._sent == len(self._rows)

    @property
    def left_bytes(self) -> int:
        return len(self) * self._row_bytes()

    def _row_bytes(self) -> int:
        update = self._vectors
        texts = update.recent if isinstance(update, UserVectors) else update.attributes
        longest = max(map(len, texts), default=0)
        if isinstance(update, ItemVectors):
            longest += 4 * max(map(len, update.titles), default=0)  # bytes of a character, at most
        return 4 * int(update.vectors.shape[1]) + longest + _HASH_BYTES


class _RemovedTask:
    def __init__(self, update: Removed) -> None:
        self.update: Update = update
        self.done = False
        self.refused = self.skipped = 0
        self._version = update.version
        self._ids = [("user", user) for user in update.users] + [("item", item) for item in update.items]
        self._sent = 0

    def __len__(self) -> int:
        return len(self._ids) - self._sent

    @property
    def left_bytes(self) -> int:
        return len(self) * _HASH_BYTES

    def send(self, writer: RedisWriter, call_bytes: int) -> None:  # noqa: ARG002 (ids are short)
        ids = self._ids[self._sent : self._sent + _ROWS_PER_CALL]
        self.refused += writer.remove(ids, self._version)
        self._sent += len(ids)
        self.done = self._sent == len(self._ids)


class _SingleTask:
    def __init__(self, update: Popular | Heartbeat) -> None:
        self.update: Update = update
        self.done = False
        self.refused = self.skipped = 0
        self._single = update

    def __len__(self) -> int:
        return 0

    @property
    def left_bytes(self) -> int:
        return 0

    def send(self, writer: RedisWriter, call_bytes: int) -> None:  # noqa: ARG002 (always one call)
        if isinstance(self._single, Popular):
            writer.popular(self._single)
        else:
            writer.heartbeat(self._single)
        self.done = True
