"""What every data set offers: interactions in stream order, and what is known of the items."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

NO_TIME = -1
_BLOCK = 8192  # rows turned into Python objects at once


class DatasetError(Exception):
    """A data set that cannot be had or read. The message names the file and, where there is one, the line."""


class Interaction(NamedTuple):
    """One user did something with one item."""

    user: str
    item: str
    timestamp_ms: int | None  # since the epoch, UTC; None where the data set has no times
    value: float | None = None  # a rating, a dwell time
    event_type: str | None = None  # None where the data set does not tell types apart
    event_id: str | None = None  # None where the data set has none of its own


@dataclass(frozen=True, slots=True)
class User:
    """What is known of one user: for MovieLens `age`, `gender` and `occupation`, where they are known."""

    user_id: str
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Item:
    """What is known of one item: `attributes` holds `genres` (a list) and `year` where they are known."""

    item_id: str
    title: str
    attributes: dict[str, Any] = field(default_factory=dict)


class Dataset(Protocol):
    """Interactions in stream order (time order, ties in file order), numbered from 0."""

    @property
    def name(self) -> str:
        """Short, for event ids."""
        ...

    def __len__(self) -> int: ...

    def interactions(self, start: int = 0) -> Iterator[Interaction]:
        """Everything from number `start` on."""
        ...

    def index_at(self, timestamp_ms: int) -> int:
        """Number of the first interaction at or after a time; DatasetError without times."""
        ...

    def items(self) -> Sequence[Item]:
        """Descriptions of the items, as far as there are any."""
        ...


def titles(dataset: Dataset) -> dict[str, str]:
    """Titles by item id, with the year where it is known: "Toy Story (1995)"."""
    return {item.item_id: _with_year(item) for item in dataset.items()}


def _with_year(item: Item) -> str:
    year = item.attributes.get("year")
    return f"{item.title} ({year})" if year else item.title


@dataclass(frozen=True)
class Table:
    """A data set in memory, as columns of N rows: row i of each is the same interaction."""

    name: str
    users: NDArray[Any]  # (N,) integers or strings
    item_ids: NDArray[Any]  # (N,) integers or strings
    timestamps_ms: NDArray[np.int64] | None  # (N,) NO_TIME = absent
    values: NDArray[np.floating[Any]] | None = None  # (N,) not a number = absent
    event_types: NDArray[np.object_] | None = None  # (N,)
    event_ids: NDArray[np.object_] | None = None  # (N,)
    descriptions: tuple[Item, ...] = ()
    people: tuple[User, ...] = ()
    folds: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)  # by name: (N,) true for its test ratings

    def __len__(self) -> int:
        return len(self.users)

    def items(self) -> tuple[Item, ...]:
        return self.descriptions

    def interactions(self, start: int = 0) -> Iterator[Interaction]:
        """Rows from `start` on."""
        for first in range(max(0, start), len(self), _BLOCK):
            yield from map(Interaction._make, zip(*self._block(first), strict=False))

    def _block(self, first: int) -> Iterator[Any]:
        rows = slice(first, first + _BLOCK)
        yield map(str, self.users[rows].tolist())
        yield map(str, self.item_ids[rows].tolist())
        yield repeat(None) if self.timestamps_ms is None else map(_timed, self.timestamps_ms[rows].tolist())
        yield repeat(None) if self.values is None else map(_present, self.values[rows].tolist())
        yield repeat(None) if self.event_types is None else self.event_types[rows].tolist()
        yield repeat(None) if self.event_ids is None else self.event_ids[rows].tolist()

    def index_at(self, timestamp_ms: int) -> int:
        if self.timestamps_ms is None:
            raise DatasetError(f"{self.name} has no timestamps to start at")
        return int(np.searchsorted(_filled(self.timestamps_ms), timestamp_ms))

    def in_time_order(self) -> "Table":
        """The same rows by time; rows of the same time stay in their order, one without a time behind its neighbour."""
        if self.timestamps_ms is None:
            return self
        times = _filled(self.timestamps_ms)
        if bool(np.all(times[1:] >= times[:-1])):
            return self
        order = np.argsort(times, kind="stable")
        optional = {name: getattr(self, name) for name in ("values", "event_types", "event_ids")}
        taken = {name: column[order] for name, column in optional.items() if column is not None}
        return replace(
            self,
            users=self.users[order],
            item_ids=self.item_ids[order],
            timestamps_ms=self.timestamps_ms[order],
            folds={name: test[order] for name, test in self.folds.items()},
            **taken,
        )


def _filled(times: NDArray[np.int64]) -> NDArray[np.int64]:
    """(N,) Where a row has no time, that of the nearest row before it that has one; 0 without one."""
    newest = np.maximum.accumulate(np.where(times == NO_TIME, -1, np.arange(len(times))))
    return np.where(newest < 0, 0, times[newest])


def _timed(time_ms: int) -> int | None:
    return None if time_ms == NO_TIME else time_ms


def _present(value: float) -> float | None:
    return None if math.isnan(value) else value
