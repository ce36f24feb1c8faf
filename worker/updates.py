"""What the loop hands to the publisher, in columns: row i of every column is the same id."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

_NO_TIMES: Integers = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Meta:
    """What one life of the worker publishes; readers find it in `rec:meta`."""

    dim: int  # of the published vectors, which may be wider than the embedding
    family: str
    exact: bool  # the dot product is the family's score, not only its best approximation
    model: str  # id of the model's whole life
    started_ms: int


@dataclass(frozen=True, slots=True)
class UserVectors:
    """Users whose vectors are new, n rows. Without rows it only moves the published positions on."""

    ids: list[str]
    vectors: Floats  # (n, dim)
    recent: list[bytes]  # JSON lists of item ids, newest first; [] = the field is not written
    events: Integers  # (n,)
    version: int  # of the publishing chunk
    updated_ms: int
    positions: bytes = b""  # JSON; what readers have seen once this is written; b"" = unchanged
    # record timestamps of the events whose acknowledgement this write is: freshness is measured from them
    event_times_ms: Integers = field(default_factory=lambda: _NO_TIMES)
    # JSON lists [[item id, full score], …], best first, of the first rows; as many rows as there are lists
    top: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ItemVectors:
    """Items whose vectors moved, n rows. An empty column is a field that is not written."""

    ids: list[str]
    vectors: Floats  # (n, dim)
    events: Integers  # (n,)
    version: int
    updated_ms: int
    titles: list[str] = field(default_factory=list)
    attributes: list[bytes] = field(default_factory=list)  # JSON
    available: list[bool] | npt.NDArray[np.bool_] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Removed:
    """Evicted ids. A key goes unless a later version has written it since.

    An id that was admitted again must carry a later version than this, or be left out here.
    """

    users: list[str]
    items: list[str]
    version: int


@dataclass(frozen=True, slots=True)
class Popular:
    """The most popular items; replaces the list that is there in one step."""

    ids: list[str]
    scores: npt.NDArray[np.float64]  # (n,)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Main figures, for `rec:worker` and `rec:stats`. A figure that is None or not finite is taken away."""

    fields: dict[str, str | int | float | None]


Update = UserVectors | ItemVectors | Removed | Popular | Heartbeat


@dataclass(frozen=True, slots=True)
class Ack:
    """`update` is in Redis: all its rows but `refused` and `skipped`."""

    update: Update
    acked_ms: int  # by this machine's clock
    refused: int = 0  # rows whose key holds a later (epoch, version)
    skipped: int = 0  # rows whose vector is not finite


class Publishes(Protocol):
    """What the loop wants of whoever publishes; see `worker.publisher.Publisher`."""

    @property
    def epoch(self) -> int | None: ...

    @property
    def seen_positions(self) -> bytes | None: ...

    @property
    def connected(self) -> bool: ...

    @property
    def superseded_by(self) -> int | None: ...

    @property
    def problem(self) -> str | None: ...

    def start(self) -> None: ...

    def take_loss(self) -> bool: ...

    def ready_for(self, kind: type[Update]) -> bool: ...

    def submit(self, update: Update) -> None: ...

    def acknowledged(self) -> list[Ack]: ...

    def sweep(self, version: int = 0) -> None: ...

    def close(self, timeout_s: float) -> bool: ...


# Fields of `rec:worker` that the publisher keeps itself.
RESERVED_FIELDS = frozenset({"epoch", "writer", "instance", "writes", "heartbeat_ms", "positions"})


def check_update(update: Update, dim: int) -> None:
    """ValueError for columns that do not fit each other or a vector that is not `dim` wide."""
    if isinstance(update, UserVectors):
        _check_vectors(update, dim, {"recent": len(update.recent)})
        if len(update.top) > len(update.ids):
            raise ValueError(f"{len(update.top)} lists of best items, {len(update.ids)} users")
    elif isinstance(update, ItemVectors):
        optional = {name: len(getattr(update, name)) for name in ("titles", "attributes", "available")}
        _check_vectors(update, dim, optional)
    elif isinstance(update, Popular) and len(update.ids) != len(update.scores):
        raise ValueError(f"{len(update.ids)} popular ids, {len(update.scores)} scores")
    elif isinstance(update, Heartbeat) and (taken := RESERVED_FIELDS & update.fields.keys()):
        raise ValueError(f"the publisher writes these itself: {sorted(taken)}")


def _check_vectors(update: UserVectors | ItemVectors, dim: int, optional: dict[str, int]) -> None:
    rows = len(update.ids)
    if update.vectors.shape != (rows, dim):
        raise ValueError(f"vectors are {update.vectors.shape}, not {(rows, dim)}")
    if len(update.events) != rows:
        raise ValueError(f"events has {len(update.events)} rows, not {rows}")
    for name, length in optional.items():
        if length not in (0, rows):
            raise ValueError(f"{name} has {length} rows, not {rows} or none")
