"""Where events come from: the protocol that Kafka and a file share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Partition(NamedTuple):
    """One partition of one topic; a file is a topic with the one partition 0."""

    topic: str
    partition: int


# A position is the NEXT offset to read, never the last one read.
Positions = dict[Partition, int]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one record came from, for logs and the dead-letter topic."""

    partition: Partition
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


class Records(Protocol):
    """What one poll brought, in columns: record i of every column is the same record."""

    values: Sequence[bytes | None]
    timestamps_ms: Sequence[int]  # of the records, milliseconds since the epoch, UTC

    def origin(self, index: int) -> Origin:
        """Record `index` whole; slow, for rejected records."""
        ...


class Source(Protocol):
    """A stream of records with positions that the caller keeps."""

    def seek(self, positions: Positions) -> None:
        """Read on from `positions`. Partitions that it does not name start where the settings say."""
        ...

    def poll(self, timeout_s: float) -> Records | None:
        """The next records, or None when none came in time. Never raises for weather."""
        ...

    def positions(self) -> Positions:
        """The next offset to read of every partition, past everything that `poll` has returned."""
        ...

    def lag(self) -> dict[Partition, int]:
        """Offsets between the position and the end that readers may see; 0 = caught up."""
        ...

    def commit(self, positions: Positions) -> None:
        """Tell the outside how far the checkpoint is. Only grows, never blocks for long, never raises."""
        ...

    @property
    def exhausted(self) -> bool:
        """True when no record will ever come again (a file at its end)."""
        ...

    @property
    def connected(self) -> bool:
        """False while the stream is out of reach or not there yet."""
        ...

    def close(self) -> None:
        """Give everything back, within a bounded time."""
        ...
