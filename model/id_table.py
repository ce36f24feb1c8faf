"""External ids and their rows."""

from collections.abc import Sequence

import numpy as np
import torch

from model.batch import Int32, Int64
from model.state import State

_RESERVED = -(2**62)


class IdTable:
    """Gives string ids dense rows from 1 on; row 0 is "unknown".

    Rows are handed out in order; freed rows are handed out again, oldest first. `capacity` is the largest
    number of ids at once; the caller evicts before it admits past it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.ids: list[str | None] = [None]  # by row
        # By row: number (from 1 on) of the last event that used it; 0 = free; below 0: reserved, used by none yet.
        self.last_used = np.zeros(1024, np.int64)
        self._next_reserved = _RESERVED
        self._rows: dict[str, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, external: str) -> bool:
        return external in self._rows

    @property
    def rows(self) -> int:
        """Rows ever handed out, row 0 included: what a table beside this one must hold."""
        return len(self.ids)

    @property
    def room(self) -> int:
        """Ids that can be admitted before something must be evicted."""
        return self.capacity - len(self._rows)

    def lookup(self, ids: Sequence[str]) -> Int32:
        """Rows of `ids` (n,), 0 where unknown. Changes nothing."""
        get = self._rows.get
        return np.fromiter((get(i, 0) for i in ids), np.int32, len(ids))

    def admit(self, ids: Sequence[str]) -> Int32:
        """Rows of `ids` (n,); unknown ids get one. Raises OverflowError when there is no room."""
        rows = self._rows
        try:
            return np.array([rows[i] for i in ids], np.int32)  # nearly always all are known
        except KeyError:
            return np.fromiter((rows[i] if i in rows else self._admit_one(i) for i in ids), np.int32, len(ids))

    def new_ids(self, ids: Sequence[str]) -> int:
        """How many distinct `ids` are unknown."""
        rows = self._rows
        return len({i for i in ids if i not in rows})

    def _admit_one(self, external: str) -> int:
        if self.room <= 0:
            raise OverflowError(f"the table holds its {self.capacity} ids; evict first")
        if self._free:
            row = self._free.pop()
            self.ids[row] = external
        else:
            row = len(self.ids)
            self.ids.append(external)
            if row >= len(self.last_used):
                self.last_used = np.concatenate([self.last_used, np.zeros_like(self.last_used)])
        self._rows[external] = row
        return row

    def touch(self, rows: Int32, sequence: Int64) -> None:
        """Note that the event with number `sequence` (n,), growing, used `rows` (n,)."""
        self.last_used[rows] = sequence  # of repeated rows the last, highest number stays

    def reserve(self, rows: Int32) -> None:
        """No event has used distinct `rows` (n,) yet: they are the first to be evicted, in this order."""
        self.last_used[rows] = self._next_reserved + np.arange(len(rows))
        self._next_reserved += len(rows)

    def least_recently_used(self, count: int) -> Int32:
        """The `count` rows (or all) whose last use is longest ago, oldest first; reserved ones before all others."""
        used = self.last_used[: self.rows]
        live = np.flatnonzero(used)  # freed rows and row 0 have no last use
        if count < len(live):
            live = live[np.argpartition(used[live], count)[:count]]
        return live[np.argsort(used[live])].astype(np.int32)

    def evict(self, rows: Int32) -> list[str]:
        """Take `rows` back; the return value is whose they were."""
        gone = []
        for row in rows.tolist():
            external = self.ids[row]
            if external is None:
                raise KeyError(f"row {row} belongs to no id")
            del self._rows[external]
            self.ids[row] = None
            gone.append(external)
        self.last_used[rows] = 0
        self._free[:0] = rows[::-1].tolist()  # taken from the end: the oldest freed row first
        return gone

    def state(self) -> State:
        """Tensors and plain data that `load` takes."""
        texts = [b"" if i is None else i.encode() for i in self.ids]
        return {
            "text": torch.frombuffer(bytearray(b"".join(texts)) or bytearray(1), dtype=torch.uint8).clone(),
            "lengths": torch.tensor([-1 if i is None else len(t) for i, t in zip(self.ids, texts, strict=True)]),
            "last_used": torch.from_numpy(self.last_used[: self.rows].copy()),
            "free": torch.tensor(self._free, dtype=torch.int64),
        }

    def load(self, state: State) -> None:
        """Become the table whose `state` this is."""
        text, lengths = state["text"], state["lengths"]
        last_used, free = state["last_used"], state["free"]
        blob, start = text.numpy().tobytes(), 0
        self.ids = []
        for length in lengths.tolist():
            self.ids.append(None if length < 0 else blob[start : start + length].decode())
            start += max(0, length)
        self._rows = {external: row for row, external in enumerate(self.ids) if external is not None}
        self._free = free.tolist()
        self.last_used = np.zeros(max(1024, 2 * self.rows), np.int64)
        self.last_used[: self.rows] = last_used.numpy()
        self._next_reserved = int(self.last_used.min())
        if self._next_reserved < 0:
            self._next_reserved = int(self.last_used[self.last_used < 0].max()) + 1
        else:
            self._next_reserved = _RESERVED
