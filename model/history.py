"""Each user's newest clicks, in one array.

A user's log is a ring of 8, 16, 32 … entries that doubles as the user clicks, up to the newest `limit` clicks:
most users click little, so a full ring for each would waste most of the memory. Position p of a log is its
p-th click, counted from 0 over the user's whole life here; (user, p) therefore names the history BEFORE that
click for as long as the ring holds it, and past events need no copy of their history.
"""

import numpy as np
import torch

from model.batch import Bool, Int32, Int64
from model.kernels import kernel
from model.state import State

SMALLEST = 8  # entries in a user's first block
_LARGEST_ARENA = 2**31 - 1  # entries: free blocks are linked by 32-bit numbers; 8 GiB


@kernel
def _append(
    users: Int32,
    items: Int32,
    observe: Bool,
    start: Int64,
    size: Int32,
    count: Int64,
    arena: Int32,
    free: Int64,
    largest: int,
    positions: Int64,
) -> int:
    """Append in order; returns how many events were done before the arena was full.

    free[0] is the first entry of the arena never used; free[1 + c] heads the list of free blocks of class c
    (SMALLEST · 2^c entries), linked through their first entries; -1 ends a list.
    """
    for n in range(users.shape[0]):
        user = users[n]
        positions[n] = count[user]
        if not observe[n]:
            continue
        if count[user] >= size[user] and size[user] < largest:
            wanted = max(SMALLEST, 2 * size[user])
            klass = 0
            while SMALLEST << klass < wanted:
                klass += 1
            block = free[1 + klass]
            if block >= 0:
                free[1 + klass] = arena[block]
            else:
                block = free[0]
                if block + wanted > arena.shape[0]:
                    return n
                free[0] = block + wanted
            old, old_size = start[user], size[user]
            for p in range(max(0, count[user] - old_size), count[user]):
                arena[block + p % wanted] = arena[old + p % old_size]
            if old_size > 0:
                arena[old : old + old_size] = 0
                arena[old] = free[klass]  # class of the old block is klass - 1, whose head is free[klass]
                free[klass] = old
            start[user], size[user] = block, wanted
        arena[start[user] + count[user] % size[user]] = items[n]
        count[user] += 1
    return len(users)


@kernel
def _window(users: Int32, positions: Int64, start: Int64, size: Int32, count: Int64, arena: Int32, out: Int32) -> None:
    """out (n, L): the items before (user, position), newest first, 0 where there are none."""
    for n in range(users.shape[0]):
        user = users[n]
        filled = 0
        oldest = max(0, count[user] - size[user])
        p = min(positions[n], count[user]) - 1
        while p >= oldest and filled < out.shape[1]:
            item = arena[start[user] + p % size[user]]
            if item > 0:  # an evicted item leaves a hole, which closes here
                out[n, filled] = item
                filled += 1
            p -= 1
        for k in range(filled, out.shape[1]):
            out[n, k] = 0


@kernel
def _before(
    users: Int32, positions: Int64, limit: int, start: Int64, size: Int32, count: Int64, arena: Int32,
    items: Int32, ends: Int64,
) -> int:  # fmt: skip
    """All items before each (user, position), one event after the other; returns how many, filled or not."""
    total = 0
    for n in range(users.shape[0]):
        user = users[n]
        oldest = max(positions[n] - limit, 0, count[user] - size[user])
        for p in range(oldest, min(positions[n], count[user])):
            item = arena[start[user] + p % size[user]]
            if item > 0:
                if total < items.shape[0]:
                    items[total] = item
                total += 1
        ends[n] = total
    return total


@kernel
def _forget_users(users: Int32, start: Int64, size: Int32, count: Int64, arena: Int32, free: Int64) -> None:
    for user in users:
        if size[user] > 0:
            klass = 0
            while SMALLEST << klass < size[user]:
                klass += 1
            arena[start[user] : start[user] + size[user]] = 0
            arena[start[user]] = free[1 + klass]
            free[1 + klass] = start[user]
        start[user] = size[user] = count[user] = 0


@kernel
def _forget_items(arena: Int32, used: int, evicted: Bool) -> None:
    for i in range(used):
        if arena[i] > 0 and evicted[arena[i]]:
            arena[i] = 0


class ClickLog:
    """The newest `limit` clicks of every user row."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.largest = SMALLEST
        while self.largest < limit:
            self.largest *= 2
        self.start = np.zeros(1024, np.int64)  # by user row: first entry of its block in the arena
        self.size = np.zeros(1024, np.int32)  # by user row: entries in its block, 0 = no block yet
        self.count = np.zeros(1024, np.int64)  # by user row: clicks ever, = the position of the next one
        self.arena = np.zeros(64 * 1024, np.int32)
        self._free = np.full(2 + (self.largest // SMALLEST).bit_length(), -1, np.int64)
        self._free[0] = 0

    def grow(self, rows: int) -> None:
        """Hold at least `rows` user rows."""
        if rows > len(self.start):
            more = max(rows, 2 * len(self.start)) - len(self.start)
            self.start = np.concatenate([self.start, np.zeros(more, np.int64)])
            self.size = np.concatenate([self.size, np.zeros(more, np.int32)])
            self.count = np.concatenate([self.count, np.zeros(more, np.int64)])

    def append(self, users: Int32, items: Int32, observe: Bool) -> Int64:
        """Append the clicks that are observed, in order; returns each event's position (n,)."""
        positions = np.empty(len(users), np.int64)
        done = 0
        while True:
            done += _append(
                users[done:], items[done:], observe[done:], self.start, self.size, self.count,
                self.arena, self._free, self.largest, positions[done:],
            )  # fmt: skip
            if done == len(users):
                return positions
            self._grow_arena()

    def _grow_arena(self) -> None:
        size = min(len(self.arena) + len(self.arena) // 2 + self.largest, _LARGEST_ARENA)
        if size < len(self.arena) + self.largest:
            raise MemoryError("the click logs are full: a smaller model.user_capacity or model.seen_items is needed")
        self.arena = np.concatenate([self.arena, np.zeros(size - len(self.arena), np.int32)])

    def window(self, users: Int32, positions: Int64, length: int) -> Int32:
        """The items before each (user, position): (n, length), newest first, 0 where there are none."""
        out = np.empty((len(users), length), np.int32)
        _window(users, positions, self.start, self.size, self.count, self.arena, out)
        return out

    def before(self, users: Int32, positions: Int64) -> tuple[Int32, Int64]:
        """All items before each (user, position): flat, and where each event's part ends (n,)."""
        items, ends = np.empty(256 * len(users), np.int32), np.empty(len(users), np.int64)
        log = (self.start, self.size, self.count, self.arena)
        total = _before(users, positions, self.limit, *log, items, ends)
        if total > len(items):
            items = np.empty(total, np.int32)
            _before(users, positions, self.limit, *log, items, ends)
        return items[:total], ends

    def newest(self, users: Int32, length: int) -> Int32:
        """The newest items of each user row: (n, length), newest first, 0 where there are none."""
        return self.window(users, self.count[users], length)

    def forget_users(self, users: Int32) -> None:
        """Empty the logs of `users` and take their blocks back, erased: a block may wait for long."""
        _forget_users(users, self.start, self.size, self.count, self.arena, self._free)

    def forget_items(self, items: Int32, item_rows: int) -> None:
        """Take `items` out of every log; their places stay, so that positions keep their meaning."""
        evicted = np.zeros(item_rows, np.bool_)
        evicted[items] = True
        # The links of free blocks lie in the arena too, and may look like items: they must stay.
        links = self._free_links()
        kept = self.arena[links].copy()
        _forget_items(self.arena, int(self._free[0]), evicted)
        self.arena[links] = kept

    def _free_links(self) -> Int64:
        links = []
        for head in self._free[1:].tolist():
            block = head
            while block >= 0:
                links.append(block)
                block = int(self.arena[block])
        return np.array(links, np.int64)

    def state(self, rows: int) -> State:
        """Tensors and plain data that `load` takes, for the first `rows` user rows."""
        return {
            "start": torch.from_numpy(self.start[:rows].copy()),
            "size": torch.from_numpy(self.size[:rows].copy()),
            "count": torch.from_numpy(self.count[:rows].copy()),
            "arena": torch.from_numpy(self.arena[: self._free[0]].copy()),
            "free": torch.from_numpy(self._free.copy()),
        }

    def load(self, state: State) -> None:
        """Become the log whose `state` this is."""
        arrays = {key: value.numpy().copy() for key, value in state.items()}
        if len(arrays["free"]) != len(self._free):
            raise ValueError(f"these logs were made for another limit than {self.limit}")
        self.start, self.size, self.count = arrays["start"], arrays["size"], arrays["count"]
        self._free = arrays["free"]
        self.arena = np.concatenate([arrays["arena"], np.zeros(64 * 1024, np.int32)])
