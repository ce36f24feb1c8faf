"""Where events come from: the protocol that Kafka and a file share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Partition(NamedTuple):
    """One partition of one topic; a file is a topic with the one partition 0."""

    topic: str
    partition: int


# A position is the NEXT offset to read, never the last one read.
Positions = dict[Partition, int]
# What tells a topic from one that was made anew under its name; by topic, empty where the stream knows no such thing.
TopicIds = dict[str, str]


class SourceError(RuntimeError):
    """Reading cannot go on without a person: a wrong setting, or a gap that the settings do not allow."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A place where the log no longer goes on where it should: retention, a truncated log, a topic made anew."""

    partition: Partition
    expected: int  # the position
    found: int  # where reading goes on; below `expected` the log has begun anew

    @property
    def lost(self) -> int:
        """Offsets that can no longer be read, at least; not all of them need have been records."""
        return max(0, self.found - self.expected)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one record came from, for logs and the dead-letter topic."""

    partition: Partition
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


class Records(Protocol):
    """What one poll brought, in columns: record i of every column is the same record."""

    @property
    def values(self) -> Sequence[bytes | None]: ...

    @property
    def timestamps_ms(self) -> Sequence[int]:
        """Of the records, milliseconds since the epoch, UTC; negative where a record has none."""
        ...

    def origin(self, index: int) -> Origin:
        """Record `index` whole; slow, for rejected records."""
        ...

    def split(self, topic: str) -> "tuple[Records | None, Records | None]":
        """Those of other topics and those of `topic`, each in order; None where there are none."""
        ...


class Source(Protocol):
    """A stream of records with positions that the caller keeps."""

    def seek(self, positions: Positions, topic_ids: TopicIds | None = None) -> None:
        """Read on from `positions`, at the start or at any time later.

        A partition that they do not name is read from its beginning if they name another one of its topic (it
        is new); otherwise it starts where the settings say. `topic_ids` are those that belong to the positions: a
        topic that has another one by now was made anew, and is read from its beginning.
        """
        ...

    def poll(self, timeout_s: float) -> Records | None:
        """The next records, or None when none came in time. Never raises for weather.

        Raises SourceError when reading cannot go on.
        """
        ...

    def positions(self) -> Positions:
        """The next offset to read of every partition, past everything that `poll` has returned."""
        ...

    def topic_ids(self) -> TopicIds:
        """The topics that the positions belong to, as far as they are known."""
        ...

    def lag(self) -> dict[Partition, int]:
        """Offsets between the position and the end that readers may see; 0 = caught up.

        The end may be a second old, and a partition whose end is not known yet is missing.
        """
        ...

    @property
    def caught_up(self) -> bool:
        """True when everything that was there to read after the newest record had come has been returned."""
        ...

    @property
    def stopped(self) -> Mapping[Partition, str]:
        """Partitions that cannot be read any further, with the reason. They stay at their position."""
        ...

    def take_gaps(self) -> list[Gap]:
        """The gaps that were found since the last call."""
        ...

    def commit(self, positions: Positions) -> None:
        """Tell the outside how far the checkpoint is. Only grows, never blocks, never raises."""
        ...

    def rewind(self, positions: Positions) -> None:
        """As `commit`, but goes back too, loudly: an older checkpoint had to be used."""
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
        """Give everything back, within a bounded time. May be called twice."""
        ...
