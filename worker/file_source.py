"""A file, or records that are there already, as a source: offline evaluation runs the same loop over it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from pathlib import Path

from worker.source import Gap, Origin, Partition, Positions, SourceError, TopicIds

Record = tuple[bytes | None, int]  # value, and timestamp in milliseconds since the epoch, UTC (negative: none)


class JsonLines:
    """The lines of a file as records without timestamps. Empty lines are no records."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise SourceError(f"{self.path} is no file")

    def __iter__(self) -> Iterator[Record]:
        with self.path.open("rb") as file:
            for line in file:
                if value := line.strip(b" \t\r\n"):
                    yield value, -1


class FileRecords:
    """The records of one poll, in columns."""

    __slots__ = ("_first", "_partition", "timestamps_ms", "values")

    def __init__(self, records: list[Record], partition: Partition, first: int) -> None:
        self._partition, self._first = partition, first
        self.values: Sequence[bytes | None]
        self.timestamps_ms: Sequence[int]
        self.values, self.timestamps_ms = zip(*records, strict=True)

    def origin(self, index: int) -> Origin:
        """Record `index` whole; it has no key."""
        value, timestamp_ms = self.values[index], self.timestamps_ms[index]
        return Origin(self._partition, self._first + index, timestamp_ms, None, value)

    def split(self, topic: str) -> "tuple[FileRecords | None, FileRecords | None]":
        """A file is one topic: all, or none."""
        return (None, self) if self._partition.topic == topic else (self, None)


class FileSource:
    """Reads records one after another; a `worker.source.Source` whose position is the index of the next record.

    `records` may be any iterable. One that can be read only once (a generator) can be sought forward only.
    """

    def __init__(self, records: Iterable[Record], *, name: str = "file", chunk: int = 2000) -> None:
        self._records, self._chunk = records, chunk
        self._partition = Partition(name, 0)
        self._position = 0
        self._rest: Iterator[Record] = iter(records)
        self._exhausted = self._closed = False

    def seek(self, positions: Positions, topic_ids: TopicIds | None = None) -> None:  # noqa: ARG002
        """Read on from `positions`, or from the beginning. Raises SourceError where that has gone by for ever."""
        position = positions.get(self._partition, 0)
        again = iter(self._records)
        if again is not self._rest:
            self._rest, self._position = again, 0
        if position < self._position:
            raise SourceError(f"{self._partition.topic} can be read only once, and record {position} has been")
        skipped = sum(1 for _ in islice(self._rest, position - self._position))
        if skipped < position - self._position:
            raise SourceError(f"{self._partition.topic} ends before its position {position}")
        self._position, self._exhausted = position, False

    def poll(self, timeout_s: float) -> FileRecords | None:  # noqa: ARG002
        """The next records; None at the end, at once."""
        records = [] if self._closed else list(islice(self._rest, self._chunk))
        self._exhausted = len(records) < self._chunk
        if not records:
            return None
        first, self._position = self._position, self._position + len(records)
        return FileRecords(records, self._partition, first)

    def positions(self) -> Positions:
        """The index of the next record."""
        return {self._partition: self._position}

    def topic_ids(self) -> TopicIds:
        """A file has none."""
        return {}

    def lag(self) -> dict[Partition, int]:
        """The records that are left, where that is known without reading them."""
        if self._exhausted:
            return {self._partition: 0}
        if isinstance(self._records, Sized):
            return {self._partition: len(self._records) - self._position}
        return {}

    @property
    def exhausted(self) -> bool:
        """True once the end has been read."""
        return self._exhausted

    @property
    def caught_up(self) -> bool:
        """The same: nothing is added to a file."""
        return self._exhausted

    @property
    def connected(self) -> bool:
        """Always."""
        return True

    @property
    def stopped(self) -> Mapping[Partition, str]:
        """Never."""
        return {}

    def take_gaps(self) -> list[Gap]:
        """Never any."""
        return []

    def commit(self, positions: Positions) -> None:
        """Nobody outside asks how far a file has been read."""

    def rewind(self, positions: Positions) -> None:
        """As `commit`."""

    def close(self) -> None:
        """Let the file go."""
        self._closed, self._rest = True, iter(())
