"""All events of a data set in columns, with dense numbers for users and items: what every recommender is shown."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from model.batch import Bool, Float32, Int32, Int64
from worker.checkpoint import now_ms
from worker.dedup import DedupWindow
from worker.evaluate.dataset import EvaluationError
from worker.events import Decoded, Decoder
from worker.file_source import FileSource, JsonLines, Record
from worker.settings import EventSettings

_CHUNK = 5000
_WIDTH = 128  # of the random projection


class Records:
    """The records in a file, each written now, as Kafka would have it: events without a time have that one."""

    def __init__(self, path: Path) -> None:
        self._lines, self._now_ms = JsonLines(path), now_ms()

    def __iter__(self) -> Iterator[Record]:
        for value, _ in self._lines:
            yield value, self._now_ms


@dataclass(frozen=True, slots=True)
class _Columns:
    users: list[str]
    items: list[str]
    weights: Float32
    observe: Bool
    times_ms: Int64


@dataclass(frozen=True)
class EventStream:
    """N events in order. Users and items are numbered from 0 in order of appearance."""

    users: Int32  # (N,)
    items: Int32  # (N,)
    weights: Float32  # (N,) of the gradient; an event above 0 is a click, which is ranked
    observe: Bool  # (N,) enters histories and counts as seen
    times_ms: Int64  # (N,)
    user_ids: list[str]
    item_ids: list[str]

    def __len__(self) -> int:
        return len(self.users)

    @cached_property
    def positive(self) -> Bool:
        """(N,) Events that are ranked and learned as clicks."""
        return self.weights > 0

    def head(self, events: int) -> "EventStream":
        """The first `events`, and only their users and items."""
        users, items = self.users[:events], self.items[:events]
        columns = (self.weights[:events], self.observe[:events], self.times_ms[:events])
        return EventStream(users, items, *columns, self.user_ids[: users.max() + 1], self.item_ids[: items.max() + 1])

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each item, by id."""
        return {item: number for number, item in enumerate(self.item_ids)}

    @cached_property
    def clicks_before(self) -> Int64:
        """(N,) Positive events on the event's item so far."""
        clicks = np.zeros(len(self.item_ids), np.int64)
        before = np.empty(len(self), np.int64)
        for n, (item, positive) in enumerate(zip(self.items.tolist(), self.positive.tolist(), strict=True)):
            before[n] = clicks[item]
            clicks[item] += positive
        return before

    @cached_property
    def item_vectors(self) -> Float32:
        """(items, 128) Unit vectors whose cosines stand for how much two items' users overlap, over all the stream.

        A random projection of the matrix of clicks, so that every recommender is measured with the same vectors.
        """
        signs = np.random.default_rng(0).integers(0, 2, (len(self.user_ids), _WIDTH), np.int8)
        vectors = np.zeros((len(self.item_ids), _WIDTH), np.float32)
        np.add.at(vectors, self.items, 2.0 * signs[self.users] - 1.0)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
        return vectors


def read_stream(records: Records, settings: EventSettings) -> EventStream:
    """The events in a file of records, decoded as the worker does. EvaluationError where there are none."""
    decoder, dedup = Decoder(settings), DedupWindow(settings.dedup_window)
    rejected: Counter[str] = Counter()
    parts = list(_parts(records, decoder, dedup, rejected))
    weights = np.concatenate([np.empty(0, np.float32), *(part.weights for part in parts)])
    if not (weights > 0).any():
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in rejected.items())
        raise EvaluationError(f"there is no event to evaluate{f' (rejected: {reasons})' if reasons else ''}")
    users, user_ids = _numbered([part.users for part in parts])
    items, item_ids = _numbered([part.items for part in parts])
    observe, times_ms = (np.concatenate([getattr(part, name) for part in parts]) for name in ("observe", "times_ms"))
    return EventStream(users, items, weights, observe, times_ms, user_ids, item_ids)


def _parts(records: Records, decoder: Decoder, dedup: DedupWindow, rejected: Counter[str]) -> Iterator[_Columns]:
    source = FileSource(records, chunk=_CHUNK)
    while read := source.poll(0.0):
        decoded = decoder.decode(read.values, read.timestamps_ms)
        rejected.update(str(record.reason) for record in decoded.rejected)
        new = dedup.first_seen(decoded.event_ids)
        yield _columns(decoded, np.flatnonzero(new & (decoded.observe | (decoded.weights != 0))))


def _columns(decoded: Decoded, rows: Int64) -> _Columns:
    users, items = ([ids[row] for row in rows.tolist()] for ids in (decoded.users, decoded.items))
    return _Columns(users, items, decoded.weights[rows], decoded.observe[rows], decoded.times_ms[rows])


def _numbered(parts: list[list[str]]) -> tuple[Int32, list[str]]:
    numbers: dict[str, int] = {}
    column = [numbers.setdefault(name, len(numbers)) for part in parts for name in part]
    return np.array(column, np.int32), list(numbers)
