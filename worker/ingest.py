"""From the records of one poll to the learner: every event ends in exactly one count."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from model.batch import EventBatch
from model.learner import Observed, OnlineLearner
from worker.catalogue import Catalogue
from worker.dedup import DedupWindow
from worker.events import Decoded, Decoder, Reason, Rejected
from worker.items import ItemDecoder
from worker.settings import Settings
from worker.source import Origin, Records

Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]
Times = npt.NDArray[np.int64]
OUTCOMES = (
    "learned", "observed", "ignored", "forgotten", "duplicate", "tombstone", "rejected", "described", "withdrawn",
)  # fmt: skip
_NO_TIMES: Times = np.empty(0, np.int64)


class RejectedSink(Protocol):
    """Takes rejected records; never blocks, never raises."""

    def send(self, origin: Origin, reason: Reason, detail: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Taken:
    """What a part of a poll changed."""

    observed: Observed
    record_times_ms: Times  # (n,) Kafka's timestamps of the observed events, where known
    forgotten: str | None = None  # a user that had to be erased, known or not
    described: list[str] = field(default_factory=list)  # items of which something else is known now


@dataclass(frozen=True, slots=True)
class ItemIntake:
    """Where the records of the items topic go."""

    topic: str  # "" = there is none
    decoder: ItemDecoder
    catalogue: Catalogue


def item_intake(settings: Settings) -> ItemIntake:
    """As the settings say, with an empty catalogue."""
    decoder = ItemDecoder(settings.events, settings.items)
    return ItemIntake(settings.kafka.items_topic, decoder, Catalogue(settings.items.capacity))


class Ingest:
    """Decodes, rejects, drops repetitions, observes; counts each record once, over the model's whole life.

    learned: has a gradient. observed: enters a history without one. ignored: its type does neither. forgotten: its
    user was erased. described, withdrawn: records of the items topic.
    """

    def __init__(
        self,
        decoder: Decoder,
        dedup: DedupWindow,
        rejected: RejectedSink,
        learner: OnlineLearner,
        items: ItemIntake | None = None,
    ) -> None:
        self._decoder, self._dedup, self._rejected, self._learner = decoder, dedup, rejected, learner
        self._items = items
        self.counts: Counter[str] = Counter()  # by outcome
        self.reasons: Counter[str] = Counter()  # of rejection
        self.records = 0

    def take(self, records: Records) -> Iterator[Taken]:
        """Everything in `records`, in order, in parts that can be published before the model learns from them.

        All parts must be asked for: what one fills is learned when the next is. Descriptions go before events: an
        item may be known by them when its first click comes.
        """
        if self._items is None or not self._items.topic:
            yield from self._take_events(records)
            return
        events, described = records.split(self._items.topic)
        if described is not None:
            yield self._describe(described, self._items)
        if events is not None:
            yield from self._take_events(events)

    def _describe(self, records: Records, items: ItemIntake) -> Taken:
        decoded = items.decoder.decode(records)
        self._reject(records, decoded.rejected)
        withdrawn = sum(description is None for _, description in decoded.changes)
        self.records += len(records.values)
        self.counts.update(
            tombstone=decoded.tombstones,
            rejected=len(decoded.rejected),
            described=len(decoded.changes) - withdrawn,
            withdrawn=withdrawn,
        )
        changed = items.catalogue.take(decoded.changes)
        return Taken(self._learn_descriptions(changed, items.catalogue), _NO_TIMES, described=changed)

    def _learn_descriptions(self, changed: list[str], catalogue: Catalogue) -> Observed:
        """What cannot be had and nobody has clicked needs no vector."""
        known = [item for item in changed if item in catalogue]
        told = [item for item in known if item not in catalogue.unavailable or item in self._learner.items]
        self._learner.describe(told, catalogue.features(told))
        return self._learner.withdraw([item for item in changed if item not in catalogue])

    def _reject(self, records: Records, rejected: list[Rejected]) -> None:
        self.reasons.update(str(each.reason) for each in rejected)
        for each in rejected:
            self._rejected.send(records.origin(each.record), each.reason, each.detail)

    def _take_events(self, records: Records) -> Iterator[Taken]:
        decoded = self._decoder.decode(records.values, records.timestamps_ms)
        self._reject(records, decoded.rejected)
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
            "catalogue": self._items.catalogue.state() if self._items else None,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.counts, self.reasons = Counter(state["counts"]), Counter(state["reasons"])
        self.records = state["records"]
        self._dedup.load(state["dedup"])
        if self._items and state.get("catalogue"):  # not there before there were items topics
            self._items.catalogue.load(state["catalogue"])


def _batch(decoded: Decoded, rows: Rows) -> EventBatch:
    """Events `rows`, growing, for the learner."""
    users, items = decoded.users, decoded.items
    if len(rows) < len(decoded):
        users, items = [users[row] for row in rows], [items[row] for row in rows]
    return EventBatch(users, items, decoded.observe[rows], decoded.weights[rows])
