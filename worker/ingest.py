"""From the records of one poll to the learner: every event ends in exactly one count."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from model.batch import EventBatch
from model.learner import Observed, OnlineLearner
from worker.dedup import DedupWindow
from worker.events import Decoded, Decoder, Reason
from worker.source import Origin, Records

Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]
Times = npt.NDArray[np.int64]
OUTCOMES = ("learned", "observed", "ignored", "forgotten", "duplicate", "tombstone", "rejected")


class RejectedSink(Protocol):
    """Takes rejected records; never blocks, never raises."""

    def send(self, origin: Origin, reason: Reason, detail: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Taken:
    """What a part of a poll changed."""

    observed: Observed
    record_times_ms: Times  # (n,) Kafka's timestamps of the observed events, where known
    forgotten: str | None = None  # a user that had to be erased, known or not


class Ingest:
    """Decodes, rejects, drops repetitions, observes; counts each event once, over the model's whole life.

    learned: has a gradient. observed: enters a history without one. ignored: its type does neither. forgotten: its
    user was erased.
    """

    def __init__(self, decoder: Decoder, dedup: DedupWindow, rejected: RejectedSink, learner: OnlineLearner) -> None:
        self._decoder, self._dedup, self._rejected, self._learner = decoder, dedup, rejected, learner
        self.counts: Counter[str] = Counter()  # by outcome
        self.reasons: Counter[str] = Counter()  # of rejection
        self.records = 0

    def take(self, records: Records) -> Iterator[Taken]:
        """Everything in `records`, in order, in parts that can be published before the model learns from them.

        All parts must be asked for: what one fills is learned when the next is.
        """
        decoded = self._decoder.decode(records.values, records.timestamps_ms)
        for rejected in decoded.rejected:
            self._rejected.send(records.origin(rejected.record), rejected.reason, rejected.detail)
        new = self._dedup.first_seen(decoded.event_ids)
        matters = new & (decoded.observe | (decoded.weights != 0))
        forget = new & decoded.forget
        self._count(records, decoded, new, matters, forget)
        times = np.asarray(records.timestamps_ms, np.int64)[decoded.records]
        rows, ends = np.flatnonzero(matters), np.flatnonzero(forget)
        first, *parts = np.split(rows, np.searchsorted(rows, ends))
        yield from self._observe(decoded, first, times)
        for end, part in zip(ends.tolist(), parts, strict=True):
            user = decoded.users[end]
            yield Taken(self._learner.forget(user), times[:0], forgotten=user)
            yield from self._observe(decoded, part, times)

    def _observe(self, decoded: Decoded, rows: Rows, times: Times) -> Iterator[Taken]:
        if not len(rows):  # between two that are forgotten, mostly
            return
        start = 0
        for observed in self._learner.observe_parts(_batch(decoded, rows)):
            part = rows[start : start + observed.events]
            timed = part[decoded.observe[part] & (times[part] >= 0)]
            yield Taken(observed, times[timed])
            start += observed.events

    def _count(self, records: Records, decoded: Decoded, new: Flags, matters: Flags, forget: Flags) -> None:
        self.records += len(records.values)
        self.reasons.update(str(r.reason) for r in decoded.rejected)
        learned = int((decoded.weights[matters] != 0).sum())
        self.counts.update(
            tombstone=decoded.tombstones,
            rejected=len(decoded.rejected),
            duplicate=int((~new).sum()),
            forgotten=int(forget.sum()),
            ignored=int((new & ~(matters | forget)).sum()),
            learned=learned,
            observed=int(matters.sum()) - learned,
        )

    def state(self) -> dict[str, Any]:
        """Plain data that `load` takes."""
        return {
            "counts": dict(self.counts),
            "reasons": dict(self.reasons),
            "records": self.records,
            "dedup": self._dedup.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.counts, self.reasons = Counter(state["counts"]), Counter(state["reasons"])
        self.records = state["records"]
        self._dedup.load(state["dedup"])


def _batch(decoded: Decoded, rows: Rows) -> EventBatch:
    """Events `rows`, growing, for the learner."""
    users, items = decoded.users, decoded.items
    if len(rows) < len(decoded):
        users, items = [users[row] for row in rows], [items[row] for row in rows]
    return EventBatch(users, items, decoded.observe[rows], decoded.weights[rows])
